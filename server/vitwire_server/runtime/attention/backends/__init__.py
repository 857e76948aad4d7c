"""Attention backends, one file each; `registry.py` imports a file only when its backend is needed.

A new backend is a file here with `load()`, and an entry in `registry.BACKENDS`.
"""
