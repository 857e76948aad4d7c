"""Attention within packed segments: a file per backend in `backends/`, their registry, and selection by measurement."""
