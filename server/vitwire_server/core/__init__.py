"""Nouns and pure rules. Standard library only."""
