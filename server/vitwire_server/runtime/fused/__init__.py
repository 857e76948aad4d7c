"""Layers, mergers and positions of a tower computed by our kernels, each compared with the stock module before use."""
