"""How embeddings arrive: assembled from messages, or written into leased memory by NIXL."""
