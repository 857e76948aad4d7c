"""Settings, and how flags, environment variables and TOML become them."""
