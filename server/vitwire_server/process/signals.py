"""SIGTERM and SIGINT: the first asks the process to end, the second insists."""

import asyncio
import signal
from collections.abc import Callable

_ECHO_SECONDS = 0.5
"""What comes so soon after the first is that one again: GNU timeout signals its child, and then the child's group."""


def on_signals(first: Callable[[], None], second: Callable[[], None]) -> None:
    """Have the running loop call `first` for the first signal, and `second` for each later one but its echo."""
    loop = asyncio.get_running_loop()
    began: float | None = None

    def heard() -> None:
        nonlocal began
        if began is None:
            began = loop.time()
            first()
        elif loop.time() - began >= _ECHO_SECONDS:
            second()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, heard)
