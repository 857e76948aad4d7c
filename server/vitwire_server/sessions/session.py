"""The seam between RPCs and the engine, which may be in another process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from vitwire_server.core.delivery import Consumer
from vitwire_server.core.items import CacheLookup, Item
from vitwire_server.core.reports import Outcome
from vitwire_server.scheduling.tickets import Priority

Settle: TypeAlias = Callable[[int, Outcome], None]
"""Receives the outcome of an item, by its key; before that, the first rows of a clip (`Encoded.is_partial`)."""
Fail: TypeAlias = Callable[[Exception], None]
"""Receives the error that ends the RPC: the engine is gone."""


@dataclass(frozen=True, slots=True)
class Opening:
    """Who calls, and how urgent it is."""

    principal: str
    """Others cannot see its items."""
    caller: str
    """Charged for uploads that are reserved."""
    deadline: float | None
    """On the monotonic clock, which all processes of a machine share."""
    priority: Priority
    request_id: str
    consumer: Consumer | None = None
    """Leases the regions of items."""


class Session(Protocol):
    """The items of one RPC in the engine, by keys that the RPC never reuses. Used on the event loop only.

    Each item that was reserved or submitted holds a permit until `release` or `close`. Its rows may be read until then.
    """

    async def reserve(self, key: int, item: Item) -> memoryview:
        """Admit an item whose bytes are still to come; returns the memory to write them into.

        Waits while this session itself holds what is missing. Raises Overloaded, DeadlineExceeded or Unavailable.
        """
        ...

    async def submit(self, items: Mapping[int, Item | CacheLookup], digests: Mapping[int, bytes]) -> None:
        """Answer items from the cache, and queue the others; admits those that were not reserved, all or none.

        `digests` of their bytes are needed where the engine caches. Raises as `reserve`, for all items together.
        """
        ...

    async def answer(self, key: int, item: Item, digest: bytes) -> bool:
        """Answer an item from the cache by the digest of its content; False if it is not cached.

        The item is then reserved or released. Raises as `reserve`.
        """
        ...

    async def forecast(self, tokens: int) -> float:
        """Predicted seconds until a new item of `tokens` tokens would be encoded. Raises Unavailable."""
        ...

    def release(self, key: int) -> None:
        """The item's rows are not read any more; an item that was not submitted is dropped."""
        ...

    def close(self) -> None:
        """Cancel what still waits, and release all items. Nothing is settled, reserved or submitted afterwards."""
        ...


class Sessions(Protocol):
    digest_seed: int | None
    """Seed of the digests that `submit` needs; None where nothing is cached."""

    def open(self, opening: Opening, settle: Settle, fail: Fail) -> Session:
        """A session, which the caller closes. `settle` is called on the event loop."""
        ...
