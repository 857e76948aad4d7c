"""Triton kernels, tested against the torch operations they replace."""
