"""Waiting for what another process, or another thread, brings about."""

import time
from collections.abc import Callable


def until(holds: Callable[[], object], seconds: float = 60) -> None:
    """Return once it holds. Raises AssertionError if it takes longer than this."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.02)
