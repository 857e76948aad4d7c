"""Checkpoints in hub layout: configuration, weights, building modules of them, adapters."""
