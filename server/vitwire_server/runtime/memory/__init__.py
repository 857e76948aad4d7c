"""Pixels to the device and rows from it: streams, pinned memory, the outbox, checked copies, pruning of tokens."""
