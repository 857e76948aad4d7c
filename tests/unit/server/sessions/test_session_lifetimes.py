"""Sessions of an engine, without one that runs."""

import asyncio
import gc
import socket
from dataclasses import dataclass, field
from threading import Thread

import pytest

from cards import CARD
from vitwire_server.caching.cache import Content, EmbeddingCache, Key, Name
from vitwire_server.caching.single_flight import SingleFlight
from vitwire_server.core.budgets import Ladder
from vitwire_server.core.costs import ASSUMED
from vitwire_server.core.errors import Overloaded, Unavailable
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import CacheLookup, DType, Embedding, Item, Modality, Pixels
from vitwire_server.core.plans import Fallback
from vitwire_server.core.reports import Outcome
from vitwire_server.observe.metrics import Metrics
from vitwire_server.scheduling.admission import Admission
from vitwire_server.scheduling.forecast import Forecast
from vitwire_server.scheduling.intake import Intake
from vitwire_server.scheduling.planner import Bounds, Planner
from vitwire_server.scheduling.tickets import Priority
from vitwire_server.sessions.arena import Arena, ArenaMemory
from vitwire_server.sessions.host import SessionHost
from vitwire_server.sessions.link import Link
from vitwire_server.sessions.local import LocalSession, LocalSessions
from vitwire_server.sessions.messages import FROM_ENGINE, FROM_RPC, Close, Queue, Reserve, form_of
from vitwire_server.sessions.outcomes import Mailbox
from vitwire_server.sessions.remote import RemoteSessions
from vitwire_server.sessions.session import Opening

LOOKUP = CacheLookup("clip", None, None, DType.FLOAT32, 1.0)
ROWS = bytes(32)
ITEM = Item(
    Modality.IMAGE,
    Grid(1, 2, 2),
    Pixels(bytes(48), DType.UINT8, (4, 12)),
    Footprint(patches=4, tokens=1, segments=1, longest=4),
    DType.FLOAT32,
)
OPENING = Opening("", "", None, Priority.INTERACTIVE, "")
PAGE = 4096


@dataclass
class Rig:
    """An engine in which `LOOKUP` is cached."""

    admission: Admission = field(default_factory=lambda: Admission(max_items=2, max_bytes=1 << 20))
    memory: ArenaMemory = field(default_factory=lambda: ArenaMemory(Arena.create(64 * PAGE), 16 * PAGE))
    settled: list[tuple[int, Outcome]] = field(default_factory=list)

    def open(self) -> LocalSession:
        """A session."""
        return self.sessions().open(OPENING, lambda key, outcome: self.settled.append((key, outcome)), lambda _: None)

    def sessions(self) -> LocalSessions:
        """The engine's sessions. Its thread does not run."""
        metrics = Metrics()
        cache = EmbeddingCache(1 << 20)
        key = Key("", "", DType.FLOAT32, 1.0, Content(Modality.IMAGE, Grid(1, 2, 2), (), b""))
        cache.put(key, Embedding(memoryview(ROWS), DType.FLOAT32, (1, 8)), {Name("", "", DType.FLOAT32, 1.0, "clip")})
        planner = Planner(Ladder(), Bounds(100, 64, 64), without_graph=Fallback.GRAPHS_OFF, costs=ASSUMED)
        intake = Intake(planner, Forecast(), metrics.engine, lambda: 0.0)
        single_flight = SingleFlight(cache, metrics.cache)
        return LocalSessions(CARD, intake, self.admission, single_flight, metrics.admission, memory=self.memory)


async def test_a_cached_item_that_was_refused_does_not_concern_later_ones() -> None:
    rig = Rig()
    session = rig.open()
    others = rig.admission.admit([1, 1])
    with pytest.raises(Overloaded):
        await session.submit({0: LOOKUP}, {})
    session.release(0)
    for permit in others:
        permit.release()
    await session.submit({1: LOOKUP}, {})
    assert [key for key, _ in rig.settled] == [1]
    assert rig.admission.held == (1, len(ROWS))
    session.close()
    assert rig.admission.held == (0, 0)


def fail() -> None:
    raise AssertionError


async def test_a_call_that_fails_does_not_lose_the_others_of_its_turn() -> None:
    mailbox, came = Mailbox(), asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    mailbox.post(fail)
    mailbox.post(came.set)
    await came.wait()


async def test_calls_run_in_order_if_one_is_posted_while_others_run() -> None:
    mailbox, ran, done = Mailbox(), list[int](), asyncio.Event()
    sender = Thread(target=mailbox.post, args=(lambda: (ran.append(2), done.set()),))
    mailbox.post(lambda: (ran.append(0), sender.start(), sender.join()))
    mailbox.post(lambda: ran.append(1))
    await asyncio.wait_for(done.wait(), 10)
    assert ran == [0, 1, 2]


async def test_memory_of_a_session_that_waits_for_itself_is_free_when_it_is_closed() -> None:
    rig, (end, other) = Rig(Admission(max_items=4, max_bytes=1 << 20)), socket.socketpair()
    link: Link[object, object] = await Link.over(end, FROM_RPC, lambda _: None)
    host = SessionHost(rig.sessions(), rig.memory, link)
    form = form_of(ITEM)
    gc.disable()
    try:
        host.receive(Reserve(0, 1, OPENING, 0, form))
        host.receive(Queue(0, 2, None, [0], {0: b"digest"}))
        host.receive(Reserve(0, 3, None, 1, form))
        others = rig.admission.admit([1, 1])
        host.receive(Reserve(0, 4, None, 2, form))  # waits, as the session holds some of what is missing
        assert rig.memory.free < 64 * PAGE
        host.receive(Close(0))
        assert rig.memory.free == 64 * PAGE
        assert rig.admission.held == (len(others), len(others))
    finally:
        gc.enable()
        link.close()
        other.close()


async def test_a_silent_engine_fails_requests_until_it_responds() -> None:
    end, other = socket.socketpair()
    link: Link[object, object] = await Link.over(end, FROM_ENGINE, lambda _: None)
    sessions = RemoteSessions(link, Arena.create(PAGE), None)
    session = sessions.open(OPENING, lambda *_: None, lambda _: None)
    sessions.lost(Unavailable("silent"))
    with pytest.raises(Unavailable, match="silent"):
        await session.reserve(0, ITEM)
    sessions.regained()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(session.reserve(1, ITEM), 0.01)
    link.close()
    other.close()
