"""Triton kernels of the graph path, each with the torch operations it replaces as its reference."""
