"""Sessions of an engine in this process."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from secrets import randbits
from typing import Protocol

from vitwire_server.caching.cache import Name
from vitwire_server.caching.keys import key_of, name_of
from vitwire_server.caching.single_flight import Joining, SingleFlight, Waiter
from vitwire_server.core.errors import EncoderError, NotCached, Overloaded, Unavailable
from vitwire_server.core.items import CacheLookup, Item
from vitwire_server.core.models import ModelCard
from vitwire_server.core.reports import Encoded, Outcome
from vitwire_server.fitting.traces import TraceWriter
from vitwire_server.scheduling.admission import Admission, Permit
from vitwire_server.scheduling.intake import Intake
from vitwire_server.scheduling.tickets import Entry, Ticket
from vitwire_server.sessions.delivering import Courier
from vitwire_server.sessions.handover import Handover
from vitwire_server.sessions.held import Held
from vitwire_server.sessions.mailbox import Mailbox
from vitwire_server.sessions.memory import Memory, PrivateMemory
from vitwire_server.sessions.session import Fail, Opening, Settle


class SessionMonitor(Protocol):
    """Counts sessions; implemented by the metrics."""

    def session_opened(self) -> None: ...

    def session_closed(self) -> None: ...


class LocalSessions:
    """The engine's admission, cache and queue. Create it on the event loop that uses it."""

    def __init__(
        self,
        card: ModelCard,
        intake: Intake,
        admission: Admission,
        single_flight: SingleFlight,
        monitor: SessionMonitor,
        *,
        memory: Memory | None = None,
        trace: TraceWriter | None = None,
        courier: Courier | None = None,
    ) -> None:
        self.card = card
        self.intake = intake
        self.admission = admission
        self.single_flight = single_flight
        self.monitor = monitor
        self.memory = memory or PrivateMemory()
        self.trace = trace
        self.courier = courier
        self.mailbox = Mailbox()
        self.digest_seed = randbits(64) if single_flight.is_on else None

    def open(self, opening: Opening, settle: Settle, fail: Fail) -> "LocalSession":
        """See Sessions. An engine that ends settles all items first, so `fail` is not called."""
        del fail
        return LocalSession(self, opening, settle)

    @property
    def width(self) -> int:
        """Columns of an embedding."""
        return self.card.geometry.width


class LocalSession:
    """See Session. Owns the ticket and the permits; `close` gives back both, whatever happened before."""

    def __init__(self, engine: LocalSessions, opening: Opening, settle: Settle) -> None:
        self._engine = engine
        self._opening = opening
        self._settle = settle
        self._held: dict[int, Held] = {}
        self._found: dict[int, Encoded | NotCached] = {}
        """Answers of items without pixels that are not admitted yet."""
        self._released = asyncio.Event()
        self.ticket = Ticket(self._encoded, opening.deadline, opening.priority, request_id=opening.request_id)
        self._handover = Handover(
            engine.single_flight, engine.courier, engine.mailbox, opening.consumer, self.ticket, settle
        )
        engine.monitor.session_opened()

    async def reserve(self, key: int, item: Item) -> memoryview:
        """See Session."""
        while (memory := self.try_reserve(key, item)) is None:
            await self._next_release()
        return memory

    async def submit(self, items: Mapping[int, Item | CacheLookup], digests: Mapping[int, bytes]) -> None:
        """See Session."""
        await self.admit(items)
        self.queue({key: item for key, item in items.items() if isinstance(item, Item)}, digests)

    async def answer(self, key: int, item: Item, digest: bytes) -> bool:
        """See Session."""
        while (found := self.try_answer(key, item, digest)) is None:
            await self._next_release()
        return found

    async def admit(self, items: Mapping[int, Item | CacheLookup]) -> None:
        """Admit items that were not reserved, all or none, and answer those without pixels. Raises Overloaded."""
        while not self.try_admit(items):
            await self._next_release()

    def try_reserve(self, key: int, item: Item) -> memoryview | None:
        """As `reserve`; None where this session itself holds what is missing."""
        self._raise_if_closed()
        engine = self._engine
        held = self._held.setdefault(key, Held())
        held.store_only = item.store_only
        if not engine.single_flight.is_on:  # else it may be cached, which only its bytes show
            engine.intake.check_deadline(self.ticket, item.footprint.tokens)
        nbytes = item.weight(engine.width)
        permits = self._try_admit(lambda: [engine.admission.promise(nbytes, self._opening.caller)])
        if permits is None:
            return None
        (held.permit,) = permits
        memory = engine.memory.allocate(item.nbytes)
        held.expect(engine.single_flight, self._name(item))
        return memory

    def try_answer(self, key: int, item: Item, digest: bytes) -> bool | None:
        """As `answer`; None where this session itself holds what is missing."""
        self._raise_if_closed()
        engine = self._engine
        waiter = self._waiter(key, item, digest)
        if not engine.single_flight.is_cached(waiter):
            return False
        permits = self._try_admit(lambda: engine.admission.admit([item.rows_nbytes(engine.width)]))
        if permits is None:
            return None
        answer = engine.single_flight.cached(waiter)
        assert answer, "nothing was evicted meanwhile"
        self._held[key] = Held(permits[0], submitted=True, region=item.region, store_only=item.store_only)
        self._deliver(key, answer)
        return True

    def try_admit(self, items: Mapping[int, Item | CacheLookup]) -> bool:
        """As `admit`; False where this session itself holds what is missing."""
        self._raise_if_closed()
        for key, item in items.items():
            held = self._held.setdefault(key, Held())
            held.region, held.store_only = item.region, item.store_only
        lookups = {key: item for key, item in items.items() if isinstance(item, CacheLookup)}
        found = {key: self._found.get(key) or self._find(item) for key, item in lookups.items()}
        # Only those of `items`: an earlier attempt may have failed.
        self._found = {key: answer for key, answer in found.items() if answer}
        nbytes = {
            key: item.weight(self._engine.width)
            for key, item in items.items()
            if isinstance(item, Item) and not self._held[key].permit
        }
        nbytes |= {
            key: answer.embedding.nbytes
            for key, answer in found.items()
            if isinstance(answer, Encoded) and not lookups[key].store_only
        }
        if nbytes:
            permits = self._try_admit(lambda: self._engine.admission.admit(list(nbytes.values())))
            if permits is None:
                return False
            for key, permit in zip(nbytes, permits, strict=True):
                self._held[key].permit = permit
        self._found = {}
        for key, item in items.items():
            if isinstance(item, Item):
                self._held[key].expect(self._engine.single_flight, self._name(item))
        for key, answer in found.items():
            if answer:
                self._deliver(key, answer)
            else:
                self._join(key, lookups[key])
        return True

    def queue(self, items: Mapping[int, Item], digests: Mapping[int, bytes]) -> None:
        """Queue admitted items, unless one of the same content is cached or in flight.

        Raises DeadlineExceeded for all of them, or Unavailable when the server shuts down.
        """
        self._raise_if_closed()
        single_flight = self._engine.single_flight
        for key in items:
            if permit := self._held[key].permit:
                permit.arrived()
        waiters = {key: self._waiter(key, items[key], digest) for key, digest in digests.items()}
        due = [i.footprint.tokens for n, i in items.items() if n not in waiters or not single_flight.holds(waiters[n])]
        if due:
            self._engine.intake.check_deadline(self.ticket, sum(due), len(due))
        for key in items:
            held = self._held[key]
            held.submitted, held.waiter, held.region = True, waiters.get(key), items[key].region
        self._run({key: item for key, item in items.items() if key not in waiters or single_flight.enter(waiters[key])})
        if self._engine.trace and items:
            self._engine.trace.record(items.values())

    def release(self, key: int) -> None:
        """See Session."""
        if held := self._held.pop(key, None):
            held.give_back(self._engine.single_flight)
        self._released.set()

    def close(self) -> None:
        """See Session. All items leave single flight before a waiter of another session is promoted."""
        if self.ticket.cancelled:
            return
        self._engine.intake.cancel(self.ticket)
        self.ticket.deliver = _discard
        held, self._held = self._held, {}
        self._engine.single_flight.leave([item.waiter for item in held.values() if item.waiter])
        for item in held.values():
            if item.joining:  # before any item of this session answers what waits for its name
                self._engine.single_flight.quit(item.joining)
        for item in held.values():
            item.give_back(self._engine.single_flight)
        self._engine.monitor.session_closed()

    async def forecast(self, tokens: int) -> float:
        """See Session."""
        return self.predicted(tokens)

    def predicted(self, tokens: int) -> float:
        """As `forecast`."""
        return self._engine.intake.forecast(self._opening.priority, tokens)

    def _raise_if_closed(self) -> None:
        """What came after `close` would never be given back. Raises Unavailable."""
        if self.ticket.cancelled:
            raise Unavailable("the RPC has ended")

    def _try_admit(self, admit: Callable[[], Sequence[Permit]]) -> Sequence[Permit] | None:
        """What `admit` returns; None where this session itself holds what is missing. Raises Overloaded."""
        try:
            return admit()
        except Overloaded as error:
            if error.reason == "uploads" or not any(item.submitted for item in self._held.values()):
                raise
        return None

    async def _next_release(self) -> None:
        self._released.clear()
        await self._released.wait()

    def _name(self, item: Item | CacheLookup) -> Name | None:
        return name_of(item, self._opening.principal, self._engine.card.fingerprint)

    def _find(self, lookup: CacheLookup) -> Encoded | NotCached | None:
        name = self._name(lookup)
        assert name, "an item without pixels has a content_id"
        flight = self._engine.single_flight
        return flight.find(name, lookup) or (flight.missed(lookup) if lookup.store_only else None)

    def _join(self, key: int, lookup: CacheLookup) -> None:
        """Wait for an item of the lookup's name, which is in flight.

        No more of a session wait than a request may have items: the RPC reads on while so many wait for others.
        """
        waiting = sum(held.joining is not None for held in self._held.values())
        if waiting >= self._engine.card.limits.items_per_request:
            text = f"{waiting} items of this RPC wait for others of their content_id: ask again once they are answered"
            self._deliver(key, Overloaded(text, reason="items", retry_seconds=1.0))
            return
        name = self._name(lookup)
        assert name, "as above"
        joining = self._held[key].joining = Joining(name, lookup, settle=partial(self._joined, key))
        self._engine.single_flight.join(joining)

    def _joined(self, key: int, outcome: Outcome) -> None:
        """Called by single flight, which has dropped what waited."""
        held = self._held[key]
        held.joining = None
        if isinstance(outcome, Encoded):
            try:
                (held.permit,) = self._engine.admission.admit([outcome.embedding.nbytes])
            except Overloaded as error:
                outcome = error
        self._deliver(key, outcome)

    def _waiter(self, key: int, item: Item, digest: bytes) -> Waiter:
        principal, fingerprint = self._opening.principal, self._engine.card.fingerprint
        return Waiter(
            key_of(item, digest, principal, fingerprint),
            name_of(item, principal, fingerprint),
            self.ticket,
            run=lambda: self._run({key: item}),
            settle=partial(self._answer, key),
        )

    def _run(self, items: Mapping[int, Item]) -> None:
        """Hand items to the engine."""
        intake = self._engine.intake
        now = intake.now()
        intake.submit(Entry(self.ticket, key, item, now) for key, item in items.items())

    def _encoded(self, key: int, outcome: Outcome) -> None:
        """Called by the engine's thread."""
        self._engine.mailbox.post(lambda: self._completed(key, outcome))

    def _completed(self, key: int, outcome: Outcome) -> None:
        held = self._held.get(key)
        if held and held.waiter:
            waiter, held.waiter = held.waiter, None
            self._engine.single_flight.completed(waiter, outcome)
        if not self.ticket.cancelled:
            self._deliver(key, outcome)

    def _answer(self, key: int, outcome: Outcome) -> None:
        """Called by single flight, which has dropped the waiter."""
        if held := self._held.get(key):
            held.waiter = None
        self._deliver(key, outcome)

    def _deliver(self, key: int, outcome: Outcome) -> None:
        """Settle an item, once its rows are in its region if it has one, else on the host if they are returned."""
        held = self._held.get(key)
        if held:
            held.settled(self._engine.single_flight, outcome if isinstance(outcome, EncoderError) else None)
        if held is None or not isinstance(outcome, Encoded):
            self._settle(key, outcome)
        elif held.store_only:
            self._handover.stored(key, outcome)
        else:
            self._handover.hand_out(key, held.region, outcome)


def _discard(key: int, outcome: Outcome) -> None:
    """Replaces `deliver` once the session is closed."""
