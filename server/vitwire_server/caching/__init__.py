"""Embeddings by content: the cache, its keys, and single flight."""
