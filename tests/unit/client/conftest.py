"""Fixtures that tests of the clients share."""

from entered import entered_async
from fake_service import running

__all__ = ["client", "running"]
client = entered_async(lambda make, running: make(running.target, timeout=60))
"""Either client of the running service, in tests of `both`."""
