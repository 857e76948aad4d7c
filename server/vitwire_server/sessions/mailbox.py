"""Calls from other threads to an event loop."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Lock


class Mailbox:
    """Runs calls of any thread on the event loop it was created on, in order.

    Calls that are posted together cost one wake-up: each wake-up is a system call, and holds the sender's thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = Lock()
        self._calls: list[Callable[[], None]] = []

    def post(self, call: Callable[[], None]) -> None:
        """Have `call` run on the loop. Thread-safe."""
        with self._lock:
            self._calls.append(call)
            if len(self._calls) > 1:
                return
        with suppress(RuntimeError):  # the loop is closed: the process is about to exit
            self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        with self._lock:
            calls, self._calls = self._calls, []
        for call in calls:
            self._loop.call_soon(call)  # one that fails ends no other
