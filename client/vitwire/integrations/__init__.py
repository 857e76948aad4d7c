"""Vitwire as the vision tower in other libraries, one module per library."""
