"""The life of a server process: loading, serving, health, signals, and the supervisor."""
