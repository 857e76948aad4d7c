"""Waiting: for a slot among the requests in flight, and for timers."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from vitwire._transport.context import log
from vitwire.errors import DeadlineExceeded

_WARN_SECONDS = 60.0
"""After which a request that may wait without limit logs a warning: it may wait for a loop that it is itself in."""


class Slots:
    """For threads."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._free = threading.Semaphore(limit) if limit else None

    @contextmanager
    def hold(self, seconds: float | None) -> Iterator[None]:
        """Take a slot for the block, once one is free. Raises DeadlineExceeded if that takes longer than `seconds`."""
        if self._free is None:
            yield
            return
        first = _WARN_SECONDS if seconds is None else seconds
        if not self._free.acquire(timeout=first):
            if seconds is not None:
                raise _late(self._limit)
            _warn(self._limit)
            self._free.acquire()
        try:
            yield
        finally:
            self._free.release()


class AsyncSlots:
    """For the tasks of an event loop."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._free = asyncio.Semaphore(limit) if limit else None

    @asynccontextmanager
    async def hold(self, seconds: float | None) -> AsyncIterator[None]:
        """As `Slots.hold`."""
        if self._free is None:
            yield
            return
        warning = asyncio.get_running_loop().call_later(_WARN_SECONDS, _warn, self._limit) if seconds is None else None
        try:
            async with asyncio.timeout(seconds):
                await self._free.acquire()
        except TimeoutError:
            raise _late(self._limit) from None
        finally:
            if warning:
                warning.cancel()
        try:
            yield
        finally:
            self._free.release()


def _warn(limit: int | None) -> None:
    reason = f"max_in_flight={limit} other requests are in flight, or in unfinished loops over iter_encode"
    log.warning("a request has waited %g s: %s", _WARN_SECONDS, reason)


def _late(limit: int | None) -> DeadlineExceeded:
    return DeadlineExceeded(f"the timeout passed while max_in_flight={limit} other requests were in flight")


class Timers:
    """Calls functions after a time, from one thread, which runs while timers are set. Thread-safe.

    Most timers are cancelled long before they are due, so setting one wakes the thread only if it is the earliest.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._set: dict[object, tuple[float, Callable[[], object]]] = {}
        self._is_running = False
        self._wakes_at = 0.0

    def start(self, seconds: float, function: Callable[[], object]) -> object:
        """Call the function after `seconds`; returns the timer."""
        timer, due = object(), time.monotonic() + seconds
        with self._changed:
            self._set[timer] = due, function
            if not self._is_running:
                self._is_running = True
                self._wakes_at = due
                threading.Thread(target=self._run, name="vitwire-timers", daemon=True).start()
            elif due < self._wakes_at:
                self._changed.notify()
        return timer

    def cancel(self, timer: object) -> bool:
        """Whether the timer was cancelled before it was due."""
        with self._changed:
            return self._set.pop(timer, None) is not None

    def close(self) -> None:
        """Cancel all timers and end the thread."""
        with self._changed:
            self._set.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._set:
                    self._is_running = False
                    return
                self._wakes_at = min(due for due, _ in self._set.values())
                if (left := self._wakes_at - time.monotonic()) > 0:
                    self._changed.wait(left)
                now = time.monotonic()
                expired = [timer for timer, (due, _) in self._set.items() if due <= now]
                functions = [self._set.pop(timer)[1] for timer in expired]
            for function in functions:
                function()
