"""Settings, from flags, environment variables and TOML. A new flag is a field of `model_flags` or `service_flags`."""
