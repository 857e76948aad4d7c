"""Tiny whole models with random weights, and the `demo-checkpoint` command."""
