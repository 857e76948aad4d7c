"""Pixels to the device and rows from it: streams, and the outbox that rows are delivered from."""
