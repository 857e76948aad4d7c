"""SIGTERM, SIGINT and SIGHUP: the first stops the process gracefully, the second at once."""

import asyncio
import signal
from collections.abc import Callable

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_DUPLICATE_SECONDS = 0.5
"""A signal this soon after the first is a duplicate: GNU timeout signals its child and then the child's group."""


def on_signals(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Have the running loop call `first` for the first signal and `second` for each later one but duplicates.

    A terminal that closes may send several SIGHUP, so these are never the second. Under `nohup` SIGHUP stays ignored.
    """
    loop = asyncio.get_running_loop()
    first_at: float | None = None

    def handle(number: signal.Signals) -> None:
        nonlocal first_at
        if first_at is None:
            first_at = loop.time()
            first()
        elif number is not signal.SIGHUP and loop.time() - first_at >= _DUPLICATE_SECONDS:
            second()

    for number in STOPPING:
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, handle, number)
