"""Images of callers: from URLs within rules, as files whose header is checked, and to embeddings."""
