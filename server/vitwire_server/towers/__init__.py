"""Vision towers: one row per model family, loading, and what a forward needs."""
