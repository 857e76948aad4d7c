"""Ladders fitted to traces, and the `budgets` command."""
