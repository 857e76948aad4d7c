"""Reading checkpoints in hub layout: the tower's weights, adapters, JSON files."""
