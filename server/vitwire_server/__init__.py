"""Vitwire's server: a vision tower behind gRPC."""
