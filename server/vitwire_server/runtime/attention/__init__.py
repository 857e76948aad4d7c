"""Attention within packed segments: backends, and their selection by measurement."""
