"""Calls to servers: connections, retries, deadlines, balancing."""
