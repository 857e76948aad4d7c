"""Items of one content that are in flight at the same time are encoded once."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from vitwire_server.caching.cache import EmbeddingCache, Key, Name
from vitwire_server.core.errors import DeadlineExceeded, EncoderError, NotCached, Unavailable
from vitwire_server.core.items import Ask, Embedding, Modality
from vitwire_server.core.reports import Encoded, ItemReport, Outcome, Path
from vitwire_server.scheduling.tickets import Ticket

_OF_THE_REQUEST = (DeadlineExceeded, Unavailable)
"""Errors of a request, which say nothing about the content of its items."""


class Tally(Protocol):
    """Told what the cache was good for; implemented by the metrics."""

    def cache_hit(self, modality: Modality) -> None: ...

    def cache_missed(self) -> None: ...


@dataclass(slots=True, eq=False)
class Visit:
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

    running: dict[Visit, None] = field(default_factory=dict)
    waiting: dict[Visit, None] = field(default_factory=dict)


class Flights:
    """Looks in the cache, and in what is in flight, before an item is queued. Used on the event loop only.

    Every visit for which `enter` was true ends with `landed` or `leave`, and a waiting one with `settle` or
    `leave`.
    """

    def __init__(self, cache: EmbeddingCache, tally: Tally) -> None:
        self._cache = cache
        self._tally = tally
        self._flights: dict[Key, _Flight] = {}

    @property
    def is_on(self) -> bool:
        """Whether anything is ever found here."""
        return self._cache.is_on

    def find(self, name: Name, ask: Ask) -> Encoded | NotCached:
        """The answer to an item without pixels."""
        found = self._cache.find(name)
        if found is not None:
            key, embedding = found
            content = key.content
            if ask.modality in (None, content.modality) and ask.grid in (None, content.grid):
                return self._hit(key, embedding)
        self._tally.cache_missed()
        return NotCached(f"no embedding of content_id {ask.content_id!r} is cached")

    def holds(self, visit: Visit) -> bool:
        """Whether the item needs no forward of its own, as things are now."""
        return self._cache.get(visit.key) is not None or self._joins(visit)

    def enter(self, visit: Visit) -> bool:
        """Whether the item is to be queued; if not, it was answered, or will be with another one of its content."""
        embedding = self._cache.get(visit.key, visit.name)
        if embedding is not None:
            visit.settle(self._hit(visit.key, embedding))
            return False
        joins = self._joins(visit)
        flight = self._flights.setdefault(visit.key, _Flight())
        (flight.waiting if joins else flight.running)[visit] = None
        if not joins:
            self._tally.cache_missed()
        return not joins

    def landed(self, visit: Visit, outcome: Outcome) -> None:
        """The item of a visit was encoded, or was not: hold its rows, and answer the visits that wait for them."""
        flight = self._flights[visit.key]
        del flight.running[visit]
        own = isinstance(outcome, _OF_THE_REQUEST)
        answered = [each for each in flight.waiting if not own or each.ticket is visit.ticket]
        for each in answered:
            del flight.waiting[each]
        if isinstance(outcome, Encoded):
            names = {each.name for each in (visit, *answered) if each.name}
            self._cache.put(visit.key, outcome.embedding, names)
        for each in answered:
            each.settle(self._hit(each.key, outcome.embedding) if isinstance(outcome, Encoded) else outcome)
        self._promote(visit.key)

    def leave(self, visits: Collection[Visit]) -> None:
        """The RPC of these visits is over: all of them leave before a visit of another RPC takes over."""
        for visit in visits:
            if flight := self._flights.get(visit.key):
                flight.running.pop(visit, None)
                flight.waiting.pop(visit, None)
        for key in {visit.key for visit in visits}:
            self._promote(key)

    def _joins(self, visit: Visit) -> bool:
        """A visit waits for nobody who may be overtaken by its own priority."""
        flight = self._flights.get(visit.key)
        return flight is not None and any(each.ticket.priority <= visit.ticket.priority for each in flight.running)

    def _promote(self, key: Key) -> None:
        """If no visit is left whose item was queued, the one of the highest priority and most time takes over."""
        flight = self._flights.get(key)
        if flight is None:
            return
        while flight.waiting and not flight.running:
            visit = min(flight.waiting, key=_rank)
            del flight.waiting[visit]
            try:
                visit.run()
            except EncoderError as error:
                visit.settle(error)
            else:
                self._tally.cache_missed()
                flight.running[visit] = None
        if not flight.running:
            del self._flights[key]

    def _hit(self, key: Key, embedding: Embedding) -> Encoded:
        self._tally.cache_hit(key.content.modality)
        tokens = embedding.shape[0]
        return Encoded(embedding, ItemReport(Path.CACHE, None, 0, tokens, queued=0.0, encoded=0.0))


def _rank(visit: Visit) -> tuple[int, float]:
    deadline = visit.ticket.deadline
    return visit.ticket.priority, -(float("inf") if deadline is None else deadline)
