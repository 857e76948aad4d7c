"""Forwards compiled for one shape by a separate process: its crash, slowness or memory costs no request."""
