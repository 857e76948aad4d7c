"""Settings, read from flags, environment variables and TOML. A new flag is a field in `settings.py`."""
