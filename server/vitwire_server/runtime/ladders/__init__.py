"""Budgets: their costs measured at start, and ladders that are learned and captured while the engine serves."""
