"""Code that runs on the device: the engine, graphs, streams, staging, attention backends and kernels."""
