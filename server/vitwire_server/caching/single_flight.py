"""Items of one content that are in flight at the same time are encoded once."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from vitwire_server.caching.cache import EmbeddingCache, Key, Name
from vitwire_server.core.errors import DeadlineExceeded, EncoderError, NotCached, Unavailable
from vitwire_server.core.items import CacheLookup, Embedding, Modality
from vitwire_server.core.reports import Encoded, ItemReport, Outcome, Path
from vitwire_server.scheduling.tickets import Ticket

_OF_THE_REQUEST = (DeadlineExceeded, Unavailable)
"""Errors of a request, which say nothing about the content of its items."""


class CacheMonitor(Protocol):
    """Told what the cache was good for; implemented by the metrics."""

    def cache_hit(self, modality: Modality) -> None: ...

    def cache_missed(self) -> None: ...


@dataclass(slots=True, eq=False)
class Waiter:
    """An item that looks for its embedding; owned by the RPC that it came with."""

    key: Key
    name: Name | None
    ticket: Ticket
    """Of that RPC: its priority and its deadline decide who runs."""
    run: Callable[[], None]
    """Queues the item. Raises EncoderError."""
    settle: Callable[[Outcome], None]
    """Answers the item."""


@dataclass(slots=True)
class _Flight:
    """Visits of one key in order: those whose items were queued, and those that wait for them."""

    running: dict[Waiter, None] = field(default_factory=dict)
    waiting: dict[Waiter, None] = field(default_factory=dict)


class SingleFlight:
    """Looks in the cache, and in what is in flight, before an item is queued. Used on the event loop only.

    Every waiter for which `enter` was true ends with `completed` or `leave`, and a waiting one with `settle` or
    `leave`.
    """

    def __init__(self, cache: EmbeddingCache, monitor: CacheMonitor) -> None:
        self._cache = cache
        self._monitor = monitor
        self._flights: dict[Key, _Flight] = {}

    @property
    def is_on(self) -> bool:
        """Whether anything is ever found here."""
        return self._cache.is_on

    def find(self, name: Name, lookup: CacheLookup) -> Encoded | NotCached:
        """The answer to an item without pixels."""
        found = self._cache.find(name)
        if found is not None:
            key, embedding = found
            content = key.content
            if lookup.modality in (None, content.modality) and lookup.grid in (None, content.grid):
                return self._hit(key, embedding)
        self._monitor.cache_missed()
        return NotCached(f"no embedding of content_id {lookup.content_id!r} is cached")

    def holds(self, waiter: Waiter) -> bool:
        """Whether the item needs no forward of its own, as things are now."""
        return self._cache.get(waiter.key) is not None or self._joins(waiter)

    def enter(self, waiter: Waiter) -> bool:
        """Whether the item is to be queued; if not, it was answered, or will be with another one of its content."""
        embedding = self._cache.get(waiter.key, waiter.name)
        if embedding is not None:
            waiter.settle(self._hit(waiter.key, embedding))
            return False
        joins = self._joins(waiter)
        flight = self._flights.setdefault(waiter.key, _Flight())
        (flight.waiting if joins else flight.running)[waiter] = None
        if not joins:
            self._monitor.cache_missed()
        return not joins

    def completed(self, waiter: Waiter, outcome: Outcome) -> None:
        """The item of a waiter was encoded, or was not: hold its rows, and answer the waiters that wait for them."""
        flight = self._flights[waiter.key]
        del flight.running[waiter]
        own = isinstance(outcome, _OF_THE_REQUEST)
        answered = [each for each in flight.waiting if not own or each.ticket is waiter.ticket]
        for each in answered:
            del flight.waiting[each]
        if isinstance(outcome, Encoded):
            names = {each.name for each in (waiter, *answered) if each.name}
            self._cache.put(waiter.key, outcome.embedding, names)
        for each in answered:
            each.settle(self._hit(each.key, outcome.embedding) if isinstance(outcome, Encoded) else outcome)
        self._promote(waiter.key)

    def leave(self, waiters: Collection[Waiter]) -> None:
        """The RPC of these waiters is over: all of them leave before a waiter of another RPC takes over."""
        for waiter in waiters:
            if flight := self._flights.get(waiter.key):
                flight.running.pop(waiter, None)
                flight.waiting.pop(waiter, None)
        for key in {waiter.key for waiter in waiters}:
            self._promote(key)

    def _joins(self, waiter: Waiter) -> bool:
        """A waiter waits for nobody who may be overtaken by its own priority."""
        flight = self._flights.get(waiter.key)
        return flight is not None and any(each.ticket.priority <= waiter.ticket.priority for each in flight.running)

    def _promote(self, key: Key) -> None:
        """If no waiter is left whose item was queued, the one of the highest priority and most time takes over."""
        flight = self._flights.get(key)
        if flight is None:
            return
        while flight.waiting and not flight.running:
            waiter = min(flight.waiting, key=_rank)
            del flight.waiting[waiter]
            try:
                waiter.run()
            except EncoderError as error:
                waiter.settle(error)
            else:
                self._monitor.cache_missed()
                flight.running[waiter] = None
        if not flight.running:
            del self._flights[key]

    def _hit(self, key: Key, embedding: Embedding) -> Encoded:
        self._monitor.cache_hit(key.content.modality)
        tokens = embedding.shape[0]
        return Encoded(embedding, ItemReport(Path.CACHE, None, 0, tokens, queued=0.0, encoded=0.0))


def _rank(waiter: Waiter) -> tuple[int, float]:
    deadline = waiter.ticket.deadline
    return waiter.ticket.priority, -(float("inf") if deadline is None else deadline)
