"""A server process: start, load, serve, drain; and the supervisor of several."""
