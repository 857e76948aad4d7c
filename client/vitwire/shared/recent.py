"""The result of a call that is kept for a while."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """The result of a call, which is made again when it is older than `seconds`."""

    def __init__(self, call: Callable[[], Awaitable[T]], seconds: float) -> None:
        self._call = call
        self._seconds = seconds
        self._until = 0.0
        self._lock = asyncio.Lock()

    async def get(self) -> T:
        """Raises as the call."""
        async with self._lock:
            if time.monotonic() >= self._until:
                self._found = await self._call()
                self._until = time.monotonic() + self._seconds
            return self._found
