"""Metrics, logs and progress: what an operator sees."""
