"""Sessions of an engine in this process."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from secrets import randbits
from typing import TypeVar

from vitwire_server.caching.cache import Name
from vitwire_server.caching.keys import key_of, name_of
from vitwire_server.caching.single_flight import Joining, SingleFlight, Waiter
from vitwire_server.core.errors import NotCached, Overloaded
from vitwire_server.core.items import CacheLookup, Item
from vitwire_server.core.models import ModelCard
from vitwire_server.core.reports import Encoded, Outcome
from vitwire_server.delivery.courier import Courier
from vitwire_server.fitting.traces import TraceWriter
from vitwire_server.observe.metrics.sessions import AdmissionMetrics
from vitwire_server.scheduling.admission import Admission, Permit
from vitwire_server.scheduling.groups import Clip, parts_of
from vitwire_server.scheduling.intake import Intake
from vitwire_server.scheduling.tickets import Entry, Ticket
from vitwire_server.sessions.arena import Memory, PrivateMemory
from vitwire_server.sessions.outcomes import ItemState, Mailbox, Outcomes
from vitwire_server.sessions.session import Fail, Opening, Settle

T = TypeVar("T")


@dataclass(slots=True)
class LocalSessions:
    """The engine's admission, cache and queue. Create it on the event loop that uses it."""

    card: ModelCard
    intake: Intake
    admission: Admission
    single_flight: SingleFlight
    monitor: AdmissionMetrics
    memory: Memory = field(default_factory=PrivateMemory)
    trace: TraceWriter | None = None
    courier: Courier | None = None
    mailbox: Mailbox = field(init=False, default_factory=Mailbox)
    digest_seed: int | None = field(init=False)
    """See Sessions."""
    width: int = field(init=False)
    """Columns of an embedding."""

    def __post_init__(self) -> None:
        self.digest_seed = randbits(64) if self.single_flight.is_on else None
        self.width = self.card.geometry.width

    def open(self, opening: Opening, settle: Settle, fail: Fail) -> "LocalSession":
        """See Sessions. An engine that ends settles all items first, so `fail` is not called."""
        del fail
        return LocalSession(self, opening, settle)

    def find(self, name: Name | None, lookup: CacheLookup) -> Encoded | NotCached | None:
        """The answer to an item without pixels; None if it is to wait for one of its name, which is in flight."""
        assert name, "an item without pixels has a content_id"
        flight = self.single_flight
        return flight.find(name, lookup) or (flight.missed(lookup) if lookup.store_only else None)

    def run(self, ticket: Ticket, items: Mapping[int, Item]) -> None:
        now, entries = self.intake.now(), list[Entry]()
        for key, item in items.items():
            clip, parts = None, list(parts_of(item, self.intake.planner.capacity, self.card.geometry.temporal))
            with suppress(Overloaded):  # then the clip runs whole
                clip = Clip(item, self.memory.allocate(item.rows_nbytes(self.width))) if parts else None
            entries += [Entry(ticket, key, each, now, clip) for each in (parts if clip else [item])]
        self.intake.submit(entries)


class LocalSession:
    """See Session. Owns the ticket and the permits; `close` gives back both, whatever happened before.

    Its `try_` methods return None, or False, if the session must release an item first.
    """

    def __init__(self, engine: LocalSessions, opening: Opening, settle: Settle) -> None:
        self._engine = engine
        self._opening = opening
        self._outcomes = Outcomes(engine.single_flight, engine.courier, engine.mailbox, opening, settle)
        self._ticket = self._outcomes.ticket
        self._found: dict[int, Encoded | NotCached] = {}
        """Answers of items without pixels that are not admitted yet."""
        self._released = asyncio.Event()
        engine.monitor.session_opened()

    async def reserve(self, key: int, item: Item) -> memoryview:
        return await self._when_released(lambda: self.try_reserve(key, item))

    async def submit(self, items: Mapping[int, Item | CacheLookup], digests: Mapping[int, bytes]) -> None:
        await self._when_released(lambda: self.try_admit(items) or None)
        self.queue({key: item for key, item in items.items() if isinstance(item, Item)}, digests)

    async def answer(self, key: int, item: Item, digest: bytes) -> bool:
        return await self._when_released(lambda: self.try_answer(key, item, digest))

    async def forecast(self, tokens: int) -> float:
        return self._engine.intake.forecast(self._opening.priority, tokens)

    def try_reserve(self, key: int, item: Item) -> memoryview | None:
        self._outcomes.raise_if_closed()
        engine = self._engine
        held = self._outcomes.held.setdefault(key, ItemState())
        held.store_only = item.store_only
        if not engine.single_flight.is_on:  # else it may be cached, which only its bytes show
            engine.intake.check_deadline(self._ticket, item.footprint.tokens)
        nbytes = item.weight(engine.width)
        permits = self._permits(lambda: [engine.admission.promise(nbytes, self._opening.caller)])
        if permits is None:
            return None
        (held.permit,) = permits
        memory = engine.memory.allocate(item.nbytes)
        held.expect(engine.single_flight, self._name(item))
        return memory

    def try_answer(self, key: int, item: Item, digest: bytes) -> bool | None:
        self._outcomes.raise_if_closed()
        engine = self._engine
        waiter = self._waiter(key, item, digest)
        if not engine.single_flight.is_cached(waiter):
            return False
        permits = self._permits(lambda: engine.admission.admit([item.rows_nbytes(engine.width)]))
        if permits is None:
            return None
        answer = engine.single_flight.cached(waiter)
        assert answer, "nothing was evicted meanwhile"
        held = ItemState(permits[0], submitted=True, region=item.region, store_only=item.store_only)
        self._outcomes.held[key] = held
        self._outcomes.deliver(key, answer)
        return True

    def try_admit(self, items: Mapping[int, Item | CacheLookup]) -> bool:
        """Admit items that were not reserved, all or none, and answer those without pixels. Raises Overloaded."""
        self._outcomes.raise_if_closed()
        held, engine = self._outcomes.held, self._engine
        for key, item in items.items():
            one = held.setdefault(key, ItemState())
            one.region, one.store_only = item.region, item.store_only
        work = {key: item for key, item in items.items() if isinstance(item, Item)}
        lookups = {key: item for key, item in items.items() if isinstance(item, CacheLookup)}
        found = self._found = self._sought(lookups)  # only of `items`: an earlier attempt may have failed
        nbytes = {key: item.weight(engine.width) for key, item in work.items() if not held[key].permit}
        for key, known in found.items():
            if isinstance(known, Encoded) and not lookups[key].store_only:
                nbytes[key] = known.embedding.nbytes
        if nbytes:
            permits = self._permits(lambda: engine.admission.admit(list(nbytes.values())))
            if permits is None:
                return False
            for key, permit in zip(nbytes, permits, strict=True):
                held[key].permit = permit
        self._found = {}
        for key, item in work.items():
            held[key].expect(engine.single_flight, self._name(item))
        for key, lookup in lookups.items():
            if key in found:
                self._outcomes.deliver(key, found[key])
            else:
                self._join(key, lookup)
        return True

    def _sought(self, lookups: Mapping[int, CacheLookup]) -> dict[int, Encoded | NotCached]:
        """Answers to items without pixels, of those that need not wait for another."""
        answers = {
            key: self._found.get(key) or self._engine.find(self._name(each), each) for key, each in lookups.items()
        }
        return {key: answer for key, answer in answers.items() if answer}

    def queue(self, items: Mapping[int, Item], digests: Mapping[int, bytes]) -> None:
        """Queue admitted items, unless one of the same content is cached or in flight.

        Raises DeadlineExceeded for all of them, or Unavailable when the server shuts down.
        """
        self._outcomes.raise_if_closed()
        engine, all_held, single_flight = self._engine, self._outcomes.held, self._engine.single_flight
        for key in items:
            if permit := all_held[key].permit:
                permit.arrived()
        waiters = {key: self._waiter(key, items[key], digest) for key, digest in digests.items()}
        due = [i.footprint.tokens for n, i in items.items() if n not in waiters or not single_flight.holds(waiters[n])]
        if due:
            engine.intake.check_deadline(self._ticket, sum(due), len(due))
        for key, item in items.items():
            held = all_held[key]
            held.submitted, held.waiter, held.region = True, waiters.get(key), item.region
        new = {n: item for n, item in items.items() if n not in waiters or single_flight.enter(waiters[n])}
        engine.run(self._ticket, new)
        if engine.trace and items:
            engine.trace.record(items.values())

    def release(self, key: int) -> None:
        if held := self._outcomes.held.pop(key, None):
            held.give_back(self._engine.single_flight)
        self._released.set()

    def close(self) -> None:
        if self._ticket.cancelled:
            return
        self._engine.intake.cancel(self._ticket)
        self._outcomes.close()
        self._engine.monitor.session_closed()

    async def _when_released(self, attempt: Callable[[], T | None]) -> T:
        """The result of `attempt`, which is repeated after each release while it is None."""
        while (result := attempt()) is None:
            self._released.clear()
            await self._released.wait()
        return result

    def _permits(self, admit: Callable[[], Sequence[Permit]]) -> Sequence[Permit] | None:
        """The result of `admit`; None if the session must release an item first. Raises Overloaded."""
        try:
            return admit()
        except Overloaded as error:
            if error.reason == "uploads" or not any(item.submitted for item in self._outcomes.held.values()):
                raise
        return None

    def _join(self, key: int, lookup: CacheLookup) -> None:
        """Wait for an item of the lookup's name, which is in flight.

        No more of a session wait than a request may have items: the RPC reads on while they wait for others.
        """
        held = self._outcomes.held
        waiting = sum(each.joining is not None for each in held.values())
        if waiting >= self._engine.card.limits.items_per_request:
            text = f"{waiting} items of this RPC wait for others of their content_id: ask again once they are answered"
            self._outcomes.deliver(key, Overloaded(text, reason="items", retry_seconds=1.0))
            return
        name = self._name(lookup)
        assert name, "as above"

        def joined(outcome: Outcome) -> None:
            """Called by single flight, which has dropped what waited."""
            held[key].joining = None
            if isinstance(outcome, Encoded):
                try:
                    (held[key].permit,) = self._engine.admission.admit([outcome.embedding.nbytes])
                except Overloaded as error:
                    outcome = error
            self._outcomes.deliver(key, outcome)

        joining = held[key].joining = Joining(name, lookup, joined)
        self._engine.single_flight.join(joining)

    def _name(self, item: Item | CacheLookup) -> Name | None:
        return name_of(item, self._opening.principal, self._engine.card.fingerprint)

    def _waiter(self, key: int, item: Item, digest: bytes) -> Waiter:
        content = key_of(item, digest, self._opening.principal, self._engine.card.fingerprint)
        run, settle = partial(self._engine.run, self._ticket, {key: item}), partial(self._outcomes.answered, key)
        return Waiter(content, self._name(item), self._ticket, run, settle)
