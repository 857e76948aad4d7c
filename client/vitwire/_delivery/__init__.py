"""Embeddings as they arrive: assembled from messages, or written into leased memory by NIXL."""
