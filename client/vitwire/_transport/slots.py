"""A limit on a client's requests in flight."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from vitwire._transport.context import log
from vitwire.errors import DeadlineExceeded

_WARN_SECONDS = 60.0
"""A request that may wait without limit logs a warning after this time: it may wait for a loop that it is itself in."""


class Slots:
    """Slots for threads."""

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
    """Slots for the tasks of an event loop."""

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
