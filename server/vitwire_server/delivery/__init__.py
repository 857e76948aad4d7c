"""Delivery of rows into consumers' memory through NIXL."""
