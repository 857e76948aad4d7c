"""Attention within segments: the backends, and how one is chosen by measurement."""
