"""Linear layers in float8, and how close embeddings stay."""
