"""Items of one content that are in flight at the same time are encoded once."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from vitwire_server.caching.cache import EmbeddingCache, Key, Name
from vitwire_server.core.errors import DeadlineExceeded, EncoderError, NotCached, Unavailable
from vitwire_server.core.items import CacheLookup, Embedding
from vitwire_server.core.reports import Encoded, ItemReport, Outcome, Path
from vitwire_server.observe.metrics.sessions import CacheMetrics
from vitwire_server.scheduling.tickets import Ticket

_OF_THE_REQUEST = (DeadlineExceeded, Unavailable)
"""Errors that concern one request only, not the content of its items."""


@dataclass(slots=True, eq=False)
class Waiter:
    """An item that needs an embedding; owned by its call."""

    key: Key
    name: Name | None
    ticket: Ticket
    """The call's ticket: priority and deadline decide which waiter runs."""
    run: Callable[[], None]
    """Queues the item. Raises EncoderError."""
    settle: Callable[[Outcome], None]
    """Answers the item."""


@dataclass(slots=True)
class _Flight:
    """The waiters of one key, oldest first: those whose items were queued, and those that wait for them."""

    running: dict[Waiter, None] = field(default_factory=dict)
    waiting: dict[Waiter, None] = field(default_factory=dict)

    def serves(self, waiter: Waiter) -> bool:
        """Whether a queued item has the waiter's priority or a higher one."""
        return any(each.ticket.priority <= waiter.ticket.priority for each in self.running)


@dataclass(slots=True, eq=False)
class Joining:
    """An item without pixels that waits for one of its name; owned by its call."""

    name: Name
    lookup: CacheLookup
    settle: Callable[[Outcome], None]
    """Answers the item."""


@dataclass(slots=True)
class _Expected:
    """A name whose rows will come."""

    items: int = 0
    """Admitted items of the name without an outcome."""
    joining: dict[Joining, None] = field(default_factory=dict)


class SingleFlight:
    """Finds an item's embedding in the cache or in flight before it is queued. Used on the event loop only.

    Every waiter for which `enter` was true ends with `completed` or `leave`, and a waiting one with `settle` or
    `leave`.
    """

    def __init__(self, cache: EmbeddingCache, monitor: CacheMetrics) -> None:
        self.is_on = cache.is_on
        """Whether anything is ever found here."""
        self.fetch = cache.fetch
        self.served_from_device = monitor.served_from_device
        self._cache = cache
        self._monitor = monitor
        self._flights: dict[Key, _Flight] = {}
        self._expected: dict[Name, _Expected] = {}

    def expect(self, name: Name) -> None:
        """An item of this name was admitted. Ends with `settled`."""
        self._expected.setdefault(name, _Expected()).items += 1

    def settled(self, name: Name, error: EncoderError | None = None) -> None:
        """An expected item has its outcome, or none will come: answer what waits for its name."""
        expected = self._expected[name]
        expected.items -= 1
        if not expected.items:
            del self._expected[name]
        answers = [(each, found) for each in expected.joining if (found := self.find(name, each.lookup))]
        for joining, _ in answers:  # all before the first `settle`, which may expect the name again
            del expected.joining[joining]
        for joining, found in answers:
            is_cause = isinstance(found, NotCached) and not isinstance(error, _OF_THE_REQUEST)
            joining.settle(error if error and is_cause else found)

    def join(self, joining: Joining) -> None:
        """Wait for an item of a name that `find` returned None for. Ends with its `settle`, or with `quit`."""
        self._expected[joining.name].joining[joining] = None

    def quit(self, joining: Joining) -> None:
        """The call of an item that waits is over."""
        if expected := self._expected.get(joining.name):
            expected.joining.pop(joining, None)

    def find(self, name: Name, lookup: CacheLookup) -> Encoded | NotCached | None:
        """The answer to an item without pixels; None if an item of its name is in flight."""
        found = self._cache.find(name)
        if found is not None:
            key, embedding = found
            content = key.content
            if lookup.modality in (None, content.modality) and lookup.grid in (None, content.grid):
                return self._hit(key, embedding)
        return None if name in self._expected else self.missed(lookup)

    def missed(self, lookup: CacheLookup) -> NotCached:
        """The answer to an item without pixels that is not cached."""
        self._monitor.cache_missed()
        return NotCached(f"no embedding of content_id {lookup.content_id!r} is cached")

    def is_cached(self, waiter: Waiter) -> bool:
        return self._cache.get(waiter.key) is not None

    def cached(self, waiter: Waiter) -> Encoded | None:
        """The answer to an item whose embedding is cached; None if it is not."""
        embedding = self._cache.get(waiter.key, waiter.name)
        return None if embedding is None else self._hit(waiter.key, embedding)

    def holds(self, waiter: Waiter) -> bool:
        """Whether the item is cached or in flight now, and needs no forward."""
        flight = self._flights.get(waiter.key)
        return self.is_cached(waiter) or (flight is not None and flight.serves(waiter))

    def enter(self, waiter: Waiter) -> bool:
        """Answer from the cache or join an item in flight; True if the item must be queued instead."""
        if found := self.cached(waiter):
            waiter.settle(found)
            return False
        flight = self._flights.setdefault(waiter.key, _Flight())
        if flight.serves(waiter):
            flight.waiting[waiter] = None
            return False
        flight.running[waiter] = None
        self._monitor.cache_missed()
        return True

    def completed(self, waiter: Waiter, outcome: Outcome) -> None:
        """A waiter's item was encoded or failed: cache the rows and answer the waiters that wait for them."""
        flight = self._flights[waiter.key]
        del flight.running[waiter]
        of_request = isinstance(outcome, _OF_THE_REQUEST)
        answered = [each for each in flight.waiting if not of_request or each.ticket is waiter.ticket]
        for each in answered:
            del flight.waiting[each]
        if isinstance(outcome, Encoded):
            names = {each.name for each in (waiter, *answered) if each.name}
            self._cache.put(waiter.key, outcome.embedding, names)
        for each in answered:
            each.settle(self._hit(each.key, outcome.embedding) if isinstance(outcome, Encoded) else outcome)
        self._promote(waiter.key)

    def leave(self, waiters: Collection[Waiter]) -> None:
        """The call of these waiters is over: all of them leave before a waiter of another call is promoted."""
        for waiter in waiters:
            if flight := self._flights.get(waiter.key):
                flight.running.pop(waiter, None)
                flight.waiting.pop(waiter, None)
        for key in {waiter.key for waiter in waiters}:
            self._promote(key)

    def _promote(self, key: Key) -> None:
        """If no item of the key is queued any more, queue the one of the highest priority and latest deadline."""
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
        report = ItemReport(Path.CACHE, None, 0, tokens, queued=0.0, encoded=0.0, grid=key.content.grid)
        return Encoded(embedding, report)


def _rank(waiter: Waiter) -> tuple[int, float]:
    deadline = waiter.ticket.deadline
    return waiter.ticket.priority, -(float("inf") if deadline is None else deadline)
