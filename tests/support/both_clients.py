"""The same calls for `Client` and `AsyncClient`, so that one test covers both."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from vitwire import AsyncClient, Client, Item

Call = Callable[..., Any]


class InThread:
    """`Client` with awaitable calls."""

    def __init__(self, target: str | None = None, **kwargs: Any) -> None:
        self.client = Client(target, **kwargs)

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        return lambda *args, **kwargs: asyncio.to_thread(getattr(self.client, name), *args, **kwargs)

    def with_options(self, **options: Any) -> "InThread":
        derived = object.__new__(InThread)
        derived.client = self.client.with_options(**options)
        return derived

    @property
    def is_closed(self) -> bool:
        return self.client.is_closed

    async def iter_encode(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        results = self.client.iter_encode(*args, **kwargs)
        try:
            while (result := await asyncio.to_thread(next, results, None)) is not None:
                yield result
        finally:
            results.close()

    async def __aenter__(self) -> "InThread":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.client.close()


both = pytest.mark.parametrize("make", [InThread, AsyncClient])


def large(value: float = 3.0) -> Item:
    """6 MiB once it is rounded, more than fits in one message."""
    return Item(np.full((16, 3 << 16), value, np.float32), (1, 8, 2))
