"""The items that are in flight: of one RPC with their outcomes, and the regions of all RPCs."""

import asyncio
from bisect import bisect
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from itertools import count

from vitwire_server.core.delivery import Consumer, Region
from vitwire_server.core.errors import InvalidTensors
from vitwire_server.core.items import Item
from vitwire_server.core.reports import Accepted, Encoded, Outcome
from vitwire_server.rpc.file_items import Prepared
from vitwire_server.scheduling.admission import Permit


@dataclass(slots=True, eq=False)
class Pending:
    """One item, from its arrival until its outcome was sent."""

    key: int
    """Its number in the session: a client may use its own numbers again."""
    answered: bool = False
    accepted: Accepted | None = None
    """Sent before the outcome if the item's rows are only stored or its region follows."""
    is_accepted: bool = False
    """Whether that was sent."""
    region: asyncio.Future[Region | None] | None = None
    """The region of an item that follows its header; the result is None once it is clear that none comes."""
    unclaim: Callable[[], None] | None = None
    """Gives its region back."""
    permit: Permit | None = None
    """Held for a file or picture, until it was decoded."""
    prepared: Prepared | None = None

    @property
    def awaits_region(self) -> bool:
        """Whether its region is still to come."""
        return not self.answered and self.region is not None and not self.region.done()

    def place(self, region: Region | None) -> None:
        """Its region arrived, or will not come. Only the first call counts."""
        if self.region and not self.region.done():
            self.region.set_result(region)

    def accept(self, item: Item) -> None:
        """Let the grid and tokens of the item precede its outcome, if that is wanted."""
        if not self.is_accepted and (item.store_only or self.region):
            self.accepted = Accepted(item.grid, item.rows)

    def give_back(self) -> None:
        """Give back its permit and region; a second call does nothing."""
        if self.permit:
            self.permit.release()
        if self.unclaim:
            self.unclaim()
            self.unclaim = None


class ItemsInFlight:
    """The items that are in flight, by the client's numbers, and a queue of their outcomes."""

    def __init__(self) -> None:
        self.items: dict[int, Pending] = {}
        self._keys = count()
        self._indices: dict[int, int] = {}
        """Client's numbers by key, of items without an outcome."""
        self._freed = asyncio.Event()
        self._ended = False
        self._outcomes: asyncio.Queue[tuple[int, Accepted | Outcome] | Exception | None] = asyncio.Queue()

    def item(self, index: int) -> Pending:
        """The item in flight; a new one if there is none of this number."""
        if (item := self.items.get(index)) is None:
            item = self.items[index] = Pending(next(self._keys))
            self._indices[item.key] = index
        return item

    def announce(self, index: int, item: Pending, forecast: float = 0.0) -> None:
        """Send what precedes the outcome of an item, unless it was sent."""
        if item.accepted and not item.is_accepted and not item.answered:
            item.is_accepted = True
            self._outcomes.put_nowait((index, replace(item.accepted, forecast=forecast)))

    def settle(self, index: int, outcome: Outcome) -> None:
        """The outcome of an item is known, or the first rows of a clip are."""
        if isinstance(outcome, InvalidTensors):
            outcome = outcome.of_item(index)
        if isinstance(outcome, Encoded) and outcome.is_partial:
            self._outcomes.put_nowait((index, outcome))
            return
        item = self.item(index)
        self._indices.pop(item.key, None)
        if isinstance(outcome, Encoded):
            self.announce(index, item)
        item.answered = True
        if item.permit:
            item.permit.release()
        self._outcomes.put_nowait((index, outcome))

    def completed(self, key: int, outcome: Outcome) -> None:
        """Called by the session."""
        index = self._indices.get(key)
        if index is not None:
            self.settle(index, outcome)

    def end(self, error: Exception | None = None) -> None:
        """No more items will come; an error ends the RPC."""
        self._outcomes.put_nowait(error)

    @property
    def are_over(self) -> bool:
        """Whether `end` was called and all items are free."""
        return self._ended and not self.items

    async def next(self) -> tuple[int, Accepted | Outcome] | None:
        """The next acceptance or outcome; None once `end` was called and all items are free.

        Raises the error given to `end`.
        """
        while not self.are_over:
            outcome = await self._outcomes.get()
            if isinstance(outcome, Exception):
                raise outcome
            if outcome is not None:
                return outcome
            self._ended = True
        return None

    def free(self, index: int) -> Pending:
        """Forget an item: the client may use its number again."""
        self._freed.set()
        return self.items.pop(index)

    async def room(self, most: int, uploading: Container[int]) -> None:
        """Wait while `most` items or more, except those uploading, are in the engine's hands or wait to be sent.

        A client that sends faster than it reads waits, as its next message is not read. What waits for a region does
        not count: that is one of the messages.
        """
        while sum(not item.awaits_region for index, item in self.items.items() if index not in uploading) >= most:
            self._freed.clear()
            await self._freed.wait()

    def close(self) -> int:
        """Give back what the items hold; returns how many have an outcome that was not sent."""
        self._indices.clear()
        items, self.items = self.items.values(), {}
        for item in items:
            item.give_back()
        while not self._outcomes.empty():
            self._outcomes.get_nowait()
        return sum(item.answered for item in items)


class Claims:
    """The regions of items in flight, of all RPCs of this process. No two of a consumer overlap."""

    def __init__(self) -> None:
        self._spans: dict[tuple[str, str], list[tuple[int, int]]] = {}
        """First address and end of each region, ascending."""

    def take(self, consumer: Consumer, region: Region) -> Callable[[], None] | None:
        """Claim a region; returns what gives it back, once. None if it overlaps with one that is claimed."""
        owner = consumer.principal, consumer.agent
        spans = self._spans.setdefault(owner, [])
        start = consumer.address + region.offset
        span = start, start + region.nbytes
        at = bisect(spans, span)
        if (at and spans[at - 1][1] > start) or (at < len(spans) and spans[at][0] < span[1]):
            return None
        spans.insert(at, span)

        def give_back() -> None:
            spans.remove(span)
            if not spans:
                del self._spans[owner]

        return give_back
