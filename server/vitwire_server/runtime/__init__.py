"""The device: attention backends, staging, graphs and the engine."""
