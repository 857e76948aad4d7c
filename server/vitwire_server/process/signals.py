"""SIGTERM and SIGINT: the first stops the process gracefully, the second at once."""

import asyncio
import signal
from collections.abc import Callable

_DUPLICATE_SECONDS = 0.5
"""A signal this soon after the first is a duplicate: GNU timeout signals its child and then the child's group."""


def on_signals(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Have the running loop call `first` for the first signal and `second` for each later one but duplicates."""
    loop = asyncio.get_running_loop()
    first_at: float | None = None

    def handle() -> None:
        nonlocal first_at
        if first_at is None:
            first_at = loop.time()
            first()
        elif loop.time() - first_at >= _DUPLICATE_SECONDS:
            second()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle)
