"""One set of tests for sessions of an engine in this process, and for those of one that is a link away."""

import asyncio
import gc
import os
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Thread

import numpy as np
import pytest

from vitwire_server.caching.cache import EmbeddingCache
from vitwire_server.caching.keys import digest_of, parts_of
from vitwire_server.caching.single_flight import SingleFlight
from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.errors import (
    DeadlineExceeded,
    EncodeFailed,
    InvalidTensors,
    NotCached,
    Overloaded,
    Unavailable,
)
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import CacheLookup, DType, Embedding, Item, Modality, Pixels
from vitwire_server.core.models import Geometry, Limits, ModelCard
from vitwire_server.core.plans import Fallback
from vitwire_server.core.reports import Encoded, Outcome, Path
from vitwire_server.core.runner import Collected, Running, Timings
from vitwire_server.observe.metrics import Metrics
from vitwire_server.scheduling.admission import Admission
from vitwire_server.scheduling.planner import Bounds, Planner
from vitwire_server.scheduling.scheduler import Scheduler
from vitwire_server.scheduling.tickets import Priority
from vitwire_server.sessions.arena import Arena, ArenaMemory
from vitwire_server.sessions.host import SessionHost, not_ready
from vitwire_server.sessions.link import Link
from vitwire_server.sessions.local import LocalSessions
from vitwire_server.sessions.messages import (
    FROM_ENGINE,
    FROM_RPC,
    Close,
    Done,
    Reply,
    Reserve,
    ToEngine,
    ToRpc,
    form_of,
    unpickled,
)
from vitwire_server.sessions.remote import RemoteSessions
from vitwire_server.sessions.session import Opening, Session, Sessions

SECONDS = 30
WIDTH = 4
LIMITS = 4, 1 << 20
"""Items and bytes that are admitted."""
BAD, BROKEN = 66, 77
"""Pixels that cannot be encoded, and that break the tower."""


@pytest.fixture(scope="module", autouse=True)
def _only_new_garbage() -> None:
    """These tests collect garbage often; what others left in this process would take half a second each time."""
    gc.collect()
    gc.freeze()


def item(level: int = 1, tokens: int = 4, content_id: str = "") -> Item:
    """An item of one level of grey, whose rows have that level too."""
    pixels = Pixels(bytes([level]) * (16 * tokens), DType.UINT8, (4 * tokens, 4))
    footprint = Footprint(4 * tokens, tokens, 1, 4 * tokens)
    return Item(Modality.IMAGE, Grid(1, 4, tokens), pixels, footprint, DType.FLOAT32, content_id=content_id)


@dataclass
class Runner:
    """Encodes whenever `open` is set; rows lie in `memory`."""

    memory: ArenaMemory
    open: Event
    depth: int = 1
    ran: list[int] = field(default_factory=list)
    """Levels of the items that ran."""

    def launch(self, items: Sequence[Item], budget: Budget | None) -> Running:
        assert budget is None
        levels = [int(np.frombuffer(each.pixels.data, np.uint8).max()) for each in items]
        assert self.open.wait(SECONDS)
        self.ran += levels
        return Batch(self, items, levels)


@dataclass
class Batch:
    runner: Runner
    items: Sequence[Item]
    levels: Sequence[int]

    def collect(self) -> Collected:
        return Collected(list(map(self._result, self.items, self.levels)), Timings(0.1, 0.2, 0.3))

    def _result(self, each: Item, level: int) -> Embedding | EncodeFailed | InvalidTensors:
        if level == BAD:
            return InvalidTensors({"pixels": "NaN"})
        if level == BROKEN:
            return EncodeFailed("broken")
        data = self.runner.memory.allocate(each.rows * WIDTH * 4)
        np.frombuffer(data, np.float32)[:] = level
        return Embedding(data, DType.FLOAT32, (each.rows, WIDTH))


SIZES = {"local": 4 << 20, "remote": 4 << 20, "spares": 32 << 20}
"""Bytes of the arena: spare blocks are granted only where they are few of it."""


class Rig:
    """An engine with everything before it, and sessions of it in one shape or the other."""

    def __init__(self, *, cached: bool, nbytes: int = 4 << 20, kept: int | None = None) -> None:
        self.metrics = Metrics()
        self.memory = ArenaMemory(Arena.create(nbytes), kept=kept or nbytes)
        self.open = Event()
        self.open.set()
        self.runner = Runner(self.memory, self.open)
        planner = Planner(Ladder(), Bounds(16, 2, 8), without_graph=Fallback.GRAPHS_OFF)
        self.scheduler = Scheduler(self.runner, planner, self.metrics.engine)
        self.thread = Thread(target=self.scheduler.run)
        self.admission = Admission(*LIMITS)
        single_flight = SingleFlight(EmbeddingCache((1 << 20) * cached), self.metrics.cache)
        self.local = LocalSessions(
            CARD, self.scheduler.intake, self.admission, single_flight, self.metrics.admission, memory=self.memory
        )
        self.sessions: Sessions = self.local
        self.host: SessionHost | None = None
        self.thread.start()

    async def over_a_link(self, *, spares: bool = False) -> "Rig":
        """Sessions over a link, with a mapping of the arena of their own; with `spares`, blocks are granted before."""
        arena = Arena(os.dup(self.memory.arena.descriptor))
        own, other = socket.socketpair()
        self.own: Link[ToEngine, ToRpc] = await Link.over(own, FROM_RPC, lambda message: host.receive(message))  # noqa: PLW0108 - it is made below
        self.other: Link[ToRpc, ToEngine] = await Link.over(other, FROM_ENGINE, lambda message: remote.receive(message))  # noqa: PLW0108 - as above
        self.host = host = SessionHost(self.local, self.memory, self.own)
        self.sessions = remote = RemoteSessions(self.other, arena, self.local.digest_seed)
        if spares:
            rpc = self.session()
            await rpc.session.forecast(1)
            rpc.close()
            await until(lambda: len(remote._spares) == len(host._spares) > 0)
        return self

    def session(self, deadline: float | None = None, principal: str = "", caller: str = "me") -> "Rpc":
        return Rpc(self, Opening(principal, caller, deadline, Priority.INTERACTIVE, "id"))

    def opened(self) -> float:
        """Sessions that are open."""
        values = [
            self.metrics.registry.get_sample_value(f"vitwire_tickets_{each}_total") for each in ("opened", "closed")
        ]
        return (values[0] or 0) - (values[1] or 0)

    def is_even(self) -> bool:
        """Whether nothing is held."""
        return self.scheduler.intake.is_empty and self.admission.held == (0, 0) and self.opened() == 0

    async def settle(self) -> None:
        """Wait until everything was given back."""
        self.open.set()
        await until(self.is_even)
        assert self.admission._promised == {}

    def used(self) -> int:
        """Bytes of the arena in use, spare blocks left out."""
        spares = sum(map(len, self.host._spares.values())) if self.host else 0
        return self.memory.arena.size - self.memory.free - spares

    async def settle_memory(self) -> None:
        """Wait until all memory is free as well: the engine's thread lets go of its last batch in its own time."""
        await self.settle()
        gc.collect()
        await until(lambda: self.used() == 0)

    async def close(self) -> None:
        self.open.set()
        self.scheduler.intake.close()
        await asyncio.to_thread(self.thread.join, SECONDS)
        if self.host:
            self.own.close()
            self.other.close()


class Rpc:
    """A session, and what became of its items."""

    def __init__(self, rig: Rig, opening: Opening) -> None:
        self.rig = rig
        self.outcomes: dict[int, Outcome] = {}
        self.faults: list[Exception] = []
        self.session: Session = rig.sessions.open(opening, self.settle, self.faults.append)

    def settle(self, key: int, outcome: Outcome) -> None:
        assert key not in self.outcomes, "one outcome"
        self.outcomes[key] = outcome

    async def submit(self, items: dict[int, Item | CacheLookup]) -> None:
        await self.session.submit(items, self.digests(items))

    def digests(self, items: dict[int, Item | CacheLookup]) -> dict[int, bytes]:
        seed = self.rig.sessions.digest_seed
        return {
            key: digest_of(parts_of(each), seed)
            for key, each in items.items()
            if isinstance(each, Item) and seed is not None
        }

    async def upload(self, key: int, sent: Item) -> None:
        memory = await self.session.reserve(key, sent)
        assert len(memory) == sent.nbytes
        memory[:] = sent.pixels.data
        await self.session.submit({key: sent.filled(memory)}, self.digests({key: sent}))

    async def outcome(self, key: int) -> Outcome:
        await until(lambda: key in self.outcomes)
        return self.outcomes[key]

    async def level(self, key: int) -> float:
        """The level of an item's rows."""
        outcome = await self.outcome(key)
        assert isinstance(outcome, Encoded), outcome
        (level,) = set(np.frombuffer(outcome.embedding.data, np.float32).tolist())
        return float(level)

    def forget(self, key: int) -> None:
        del self.outcomes[key]
        self.session.release(key)

    def close(self) -> None:
        self.session.close()
        self.outcomes.clear()


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


CARD = ModelCard(
    model_id="tiny",
    model_type="tiny",
    fingerprint="",
    dtype=DType.FLOAT32,
    geometry=Geometry(2, 2, 1, 1, WIDTH, 0),
    preprocessing={},
    ladder=Ladder(),
    dropped={},
    limits=Limits(1 << 20, 8, 1 << 10, *LIMITS),
    graphs="off",
    attention="sdpa",
    device="cpu",
    version="0",
)


@pytest.fixture(params=["local", "remote", "spares"])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    made = Rig(cached=False, nbytes=SIZES[request.param])
    try:
        yield await made.over_a_link(spares=request.param == "spares") if request.param != "local" else made
        await made.settle_memory()
    finally:
        await made.close()


@pytest.fixture(params=["local", "remote", "spares"])
async def caching(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    made = Rig(cached=True, nbytes=SIZES[request.param])
    try:
        yield await made.over_a_link(spares=request.param == "spares") if request.param != "local" else made
        await made.settle_memory()
    finally:
        await made.close()


@pytest.fixture
async def remote() -> AsyncIterator[Rig]:
    made = Rig(cached=False)
    try:
        yield await made.over_a_link()
        await made.settle_memory()
    finally:
        await made.close()


async def test_spare_blocks_are_replaced_while_a_session_is_open() -> None:
    made = Rig(cached=False, nbytes=SIZES["spares"])
    try:
        await made.over_a_link(spares=True)
        assert isinstance(made.sessions, RemoteSessions)
        full = len(made.sessions._spares)
        rpc = made.session()
        for key in range(2 * full):
            await rpc.submit({key: item(key)})
            assert await rpc.level(key) == key
            rpc.forget(key)
            await until(lambda: full // 2 < len(made.sessions._spares) <= full)
        rpc.close()
        await made.settle_memory()
    finally:
        await made.close()


async def test_blocks_of_encoded_items_are_spare_again() -> None:
    """Also if the request is over; nothing more is granted. Those of cancelled items are not, as they may be read."""
    rig = Rig(cached=False, nbytes=SIZES["spares"])
    await rig.over_a_link(spares=True)
    assert isinstance(rig.sessions, RemoteSessions)
    assert rig.host
    host, spares, all_of_them = rig.host, rig.sessions._spares, set(rig.sessions._spares)
    try:
        for key in range(20):
            rpc = rig.session()
            await rpc.submit({key: item(key), key + 1: item(key + 1)})
            if key % 2:
                assert await rpc.level(key) == key
            await until(lambda: set(host._spares) == all_of_them)  # the link need not have brought that yet
            rpc.close()
            await until(lambda: set(spares) == all_of_them)
        rig.open.clear()
        rpc = rig.session()
        await rpc.submit({1: item(1)})
        rpc.close()
        await until(lambda: not host._sessions)  # else the item might be encoded before it is cancelled
        rig.open.set()
        await rig.settle_memory()
        assert len(spares) == len(all_of_them) - 1
        assert set(spares) == set(host._spares) < all_of_them
    finally:
        await rig.close()


async def test_blocks_that_are_not_pinned_are_spare_once() -> None:
    """The engine copies what lies in them once more. Here all but the first of them do."""
    rig = Rig(cached=False, nbytes=SIZES["spares"], kept=1 << 20)
    await rig.over_a_link(spares=True)
    assert isinstance(rig.sessions, RemoteSessions)
    assert rig.host
    host, spares, count = rig.host, rig.sessions._spares, len(rig.sessions._spares)
    rpc = rig.session()
    try:
        for key in range(4):
            await rpc.submit({key: item(key)})
            assert await rpc.level(key) == key
            assert len(spares) == len(host._spares) == count - key - 1
        rpc.close()
        await rig.settle_memory()
    finally:
        await rig.close()


async def test_nothing_is_sent_if_no_spare_block_is_granted() -> None:
    """Half of this arena has no room for one."""
    rig = Rig(cached=False, nbytes=1 << 20)
    await rig.over_a_link()
    came: list[type[ToRpc]] = []
    receive = rig.other._receive
    rig.other._receive = lambda message: (came.append(type(message)), receive(message))[1]
    try:
        rpc = rig.session()
        for key in range(3):
            await rpc.submit({key: item(key)})
            assert await rpc.level(key) == key
            rpc.forget(key)
        rpc.close()
        await rig.settle_memory()
        assert Counter(came) == {Reply: 6, Done: 3}
    finally:
        await rig.close()


async def test_items_of_spare_blocks_are_copied_in_one_turn_at_most() -> None:
    """Nothing else runs in the process meanwhile; larger requests are copied in parts."""
    rig = Rig(cached=False, nbytes=SIZES["spares"])
    rig.admission = rig.local.admission = Admission(12, 12 << 20)
    await rig.over_a_link(spares=True)
    assert isinstance(rig.sessions, RemoteSessions)
    spares, left = rig.sessions._spares, []
    try:
        for count in (4, 5):
            rpc = rig.session()
            rig.open.clear()
            await rpc.submit({key: item(key, tokens=1 << 16) for key in range(count)})
            left.append(len(spares))
            rig.open.set()
            assert [await rpc.level(key) for key in range(count)] == list(range(count))
            rpc.close()
        assert left == [12, 16]
        await rig.settle_memory()
    finally:
        await rig.close()


@dataclass
class Watching(Runner):
    """Notes whether items still have their own pixels after a while."""

    whole: list[bool] = field(default_factory=list)

    def launch(self, items: Sequence[Item], budget: Budget | None) -> Running:
        running = super().launch(items, budget)
        time.sleep(0.001)
        self.whole += [len(set(bytes(each.pixels.data))) == 1 for each in items]
        return running


async def restless(rig: Rig, seed: int) -> None:
    """Sessions with items around the size of a spare block that end at any point."""
    chance = random.Random(seed)
    for _ in range(30):
        rpc = rig.session()
        levels = {key: chance.randint(1, 60) for key in range(chance.choice((1, 1, 2, 5)))}
        tokens = chance.choice((1, 300, (1 << 16) - 1, 1 << 16, (1 << 16) + 1))
        submitting = asyncio.create_task(rpc.submit({key: item(levels[key], tokens) for key in levels}))
        await asyncio.wait([submitting], timeout=chance.choice((0, 0.001, SECONDS)))
        if submitting.done() and not submitting.exception() and chance.random() < 0.8:
            assert [await rpc.level(key) for key in levels] == list(levels.values())
        submitting.cancel()
        rpc.close()


async def test_blocks_stay_with_their_items_whatever_becomes_of_sessions() -> None:
    rig = Rig(cached=False, nbytes=SIZES["spares"])
    rig.admission = rig.local.admission = Admission(12, 12 << 20)
    rig.scheduler._runner = runner = Watching(rig.memory, rig.open)
    await rig.over_a_link(spares=True)
    try:
        await asyncio.gather(*(restless(rig, seed) for seed in range(6)))
        assert all(runner.whole)
        assert len(runner.whole) > 20
        await rig.settle_memory()
    finally:
        await rig.close()


async def test_items_are_answered_with_their_rows_and_reports(rig: Rig) -> None:
    rpc = rig.session()
    await rpc.submit({1: item(10), 2: item(20, tokens=7)})
    await rpc.upload(3, item(30))
    assert [await rpc.level(key) for key in (1, 2, 3)] == [10, 20, 30]
    outcome = rpc.outcomes[2]
    assert isinstance(outcome, Encoded)
    assert (outcome.embedding.shape, outcome.embedding.dtype) == ((7, WIDTH), DType.FLOAT32)
    assert (outcome.report.path, outcome.report.tokens, outcome.report.fallback) == (Path.EAGER, 7, Fallback.GRAPHS_OFF)
    assert outcome.report.timings
    assert rig.admission.held[0] == 3, "until they are released"
    rpc.close()


async def test_large_items_do_not_hold_up_the_event_loop(rig: Rig) -> None:
    """Bytes are copied in parts, with other tasks in between; what arrives is whole."""
    large = Item(
        Modality.IMAGE,
        Grid(1, 4, 4),
        Pixels(bytes(900_000), DType.UINT8, (900_000,)),
        Footprint(16, 4, 1, 16),
        DType.FLOAT32,
        crops=Pixels(b"\x05" * 100_000, DType.UINT8, (100_000,)),
    )
    rpc = rig.session()
    await rpc.submit({1: large})
    assert await rpc.level(1) == 0
    rpc.close()


async def test_a_full_server_refuses_all_items_or_none(rig: Rig) -> None:
    rig.open.clear()
    other, rpc = rig.session(), rig.session()
    await other.submit({1: item(), 2: item()})
    held = rig.admission.held
    with pytest.raises(Overloaded) as full:
        await rpc.submit({key: item() for key in range(3)})
    assert (full.value.reason, rig.admission.held) == ("items", held)
    assert 0 < full.value.retry_seconds <= 1
    with pytest.raises(Overloaded) as full:
        await rpc.submit({key: item(tokens=20_000) for key in (3, 4)})
    assert (full.value.reason, rig.admission.held) == ("bytes", held)
    await rpc.submit({5: item(), 6: item()})
    third = rig.session()
    with pytest.raises(Overloaded):
        await third.session.reserve(1, item())
    for each in (other, rpc, third):
        each.close()
    assert rpc.faults == []


async def test_a_caller_with_too_many_unfinished_uploads_is_refused(rig: Rig) -> None:
    rpcs = [rig.session(caller="one") for _ in range(4)]
    for rpc in rpcs[:3]:
        await rpc.session.reserve(0, item())
    with pytest.raises(Overloaded) as full:
        await rpcs[3].session.reserve(0, item())
    assert full.value.reason == "uploads"
    another = rig.session(caller="another")
    await another.session.reserve(0, item())
    for rpc in (*rpcs, another):
        rpc.close()


@pytest.mark.parametrize("reserves", [True, False])
async def test_a_session_waits_for_what_it_holds_itself(rig: Rig, *, reserves: bool) -> None:
    rpc = rig.session()
    await rpc.submit({key: item(key) for key in range(4)})
    fifth = asyncio.create_task(rpc.upload(4, item(44)) if reserves else rpc.submit({4: item(44)}))
    assert [await rpc.level(key) for key in range(4)] == [0, 1, 2, 3]
    await asyncio.sleep(0.05)
    assert not fifth.done()
    rpc.forget(2)
    await asyncio.wait_for(fifth, SECONDS)
    assert await rpc.level(4) == 44
    assert rig.admission.held[0] == 4
    rpc.close()


async def test_an_item_that_was_not_submitted_is_dropped_by_its_release(rig: Rig) -> None:
    rpc = rig.session()
    await rpc.session.reserve(1, item())
    assert rig.admission.held[0] == 1
    rpc.session.release(1)
    rpc.session.release(1)
    await until(lambda: rig.admission.held == (0, 0))
    rpc.close()
    rpc.close()


async def test_a_closed_session_takes_nothing(rig: Rig) -> None:
    """Neither what is sent after the close, nor what is on its way at that moment."""
    rpc = rig.session()
    await rpc.session.reserve(1, item())
    rpc.close()
    with pytest.raises(Unavailable, match="has ended"):
        await rpc.session.reserve(2, item())
    with pytest.raises(Unavailable, match="has ended"):
        await rpc.submit({3: item()})
    with pytest.raises(Unavailable, match="has ended"):
        await rpc.submit({1: item()})
    rpc.session.release(1)
    other = rig.session()
    await other.submit({1: item(5)})
    assert await other.level(1) == 5
    other.close()


async def test_rows_stay_until_their_release(rig: Rig) -> None:
    """Other items come and go meanwhile, in memory that others gave back."""
    rpc, others = rig.session(), rig.session()
    await rpc.submit({1: item(11)})
    await rpc.outcome(1)
    for level in range(20):
        await others.upload(level, item(100 + level))
        assert await others.level(level) == 100 + level
        others.forget(level)
        assert await rpc.level(1) == 11
    rpc.close()
    others.close()


async def test_failures_are_outcomes_of_their_items(rig: Rig) -> None:
    rpc = rig.session()
    await rpc.submit({1: item(BAD), 2: item(2), 3: item(BROKEN)})
    outcomes = [await rpc.outcome(key) for key in (1, 3)]
    assert isinstance(outcomes[0], InvalidTensors)
    assert outcomes[0].reasons == {"pixels": "NaN"}
    assert isinstance(outcomes[1], EncodeFailed)
    assert str(outcomes[1]) == "broken"
    assert await rpc.level(2) == 2
    rpc.close()


async def test_deadlines(rig: Rig) -> None:
    late, soon = rig.session(deadline=time.monotonic() - 1), rig.session(deadline=time.monotonic() + 2)
    with pytest.raises(DeadlineExceeded):
        await late.submit({1: item()})
    with pytest.raises(DeadlineExceeded):
        await late.session.reserve(2, item())
    rig.open.clear()
    blocking = rig.session()
    await blocking.submit({1: item(1, tokens=16)})
    await until(lambda: rig.scheduler.intake.is_empty)
    await soon.submit({1: item(9)})
    await asyncio.sleep(2.1)
    rig.open.set()
    assert isinstance(await soon.outcome(1), DeadlineExceeded)
    assert 9 not in rig.runner.ran
    for rpc in (late, soon, blocking):
        rpc.close()


async def test_after_close_nothing_is_settled_or_runs(rig: Rig) -> None:
    rig.open.clear()
    rpc, next_ = rig.session(), rig.session()
    await rpc.submit({key: item(5 + key) for key in range(3)})
    rpc.close()
    await next_.submit({1: item(9)})
    rig.open.set()
    assert await next_.level(1) == 9
    assert rpc.outcomes == {}
    assert len([level for level in rig.runner.ran if level != 9]) <= 2, "what was on the device at most"
    next_.close()


async def test_a_server_that_shuts_down_says_so(rig: Rig) -> None:
    rig.scheduler.intake.close()
    rpc = rig.session()
    with pytest.raises(Unavailable, match="shutting down"):
        await rpc.submit({1: item()})
    rpc.close()


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("shape", ["local", "remote"])
async def test_close_at_any_point_gives_everything_back(shape: str, *, cached: bool) -> None:
    rig = Rig(cached=cached)
    if shape == "remote":
        await rig.over_a_link()

    async def work(rpc: Rpc) -> None:
        await rpc.upload(1, item(1))
        await rpc.submit({2: item(2), 3: item(1), 4: item(4)})
        waiting = asyncio.create_task(rpc.upload(5, item(5)))
        try:
            await rpc.outcome(2)
            rpc.forget(2)
            await waiting
            await rpc.level(5)
        finally:
            waiting.cancel()

    finished = 0
    for turns in range(0, 90, 1 if shape == "remote" else 3):
        rpc = rig.session()
        task = asyncio.create_task(work(rpc))
        for _ in range(turns):
            await asyncio.sleep(0 if turns % 2 else 0.0003)
        finished += task.done()
        task.cancel()
        rpc.close()
        await asyncio.wait([task])
        assert task.cancelled() or not task.exception() or "has ended" in str(task.exception()), task
        await rig.settle()
    await asyncio.wait_for(work(rpc := rig.session()), SECONDS)
    rpc.close()
    await rig.settle_memory()
    assert finished < turns
    await rig.close()


async def test_equal_items_are_encoded_once_and_found_by_name(caching: Rig) -> None:
    caching.open.clear()
    rpcs = [caching.session() for _ in range(3)]
    for rpc in rpcs:
        await rpc.submit({1: item(8, content_id="eight")})
    caching.open.set()
    assert [await rpc.level(1) for rpc in rpcs] == [8, 8, 8]
    assert caching.runner.ran == [8]
    paths = Counter(outcome.report.path for rpc in rpcs if isinstance(outcome := rpc.outcomes[1], Encoded))
    assert paths == {Path.EAGER: 1, Path.CACHE: 2}
    named = rpcs[0]
    lookup = CacheLookup("eight", None, None, DType.FLOAT32, 0.0)
    await named.submit({2: lookup, 3: CacheLookup("nine", None, None, DType.FLOAT32, 0.0)})
    assert await named.level(2) == 8
    assert isinstance(await named.outcome(3), NotCached)
    named.forget(1)
    await named.upload(4, item(8))
    assert await named.level(4) == 8
    stranger = caching.session(principal="stranger")
    await stranger.submit({1: lookup})
    assert isinstance(await stranger.outcome(1), NotCached)
    assert caching.runner.ran == [8]
    for rpc in (*rpcs, stranger):
        rpc.close()


async def test_readers_of_cached_rows_share_one_copy(caching: Rig) -> None:
    rpc = caching.session()
    await rpc.submit({1: item(8, content_id="eight")})
    assert await rpc.level(1) == 8
    rpc.forget(1)
    readers = [caching.session() for _ in range(3)]
    for reader in readers:
        await reader.submit({1: CacheLookup("eight", None, None, DType.FLOAT32, 0.0)})
        assert await reader.level(1) == 8
    await until(lambda: caching.used() <= 4096)
    for reader in readers[:2]:
        reader.close()
    assert await readers[2].level(1) == 8
    await rpc.submit({2: item(8)})
    assert await rpc.level(2) == 8
    rpc.close()
    readers[2].close()


async def test_the_item_of_a_session_that_leaves_runs_for_those_that_wait(caching: Rig) -> None:
    caching.open.clear()
    blocking, first, second = (caching.session() for _ in range(3))
    await blocking.submit({1: item(1, tokens=16)})
    await until(lambda: caching.scheduler.intake.is_empty)
    await first.submit({1: item(7)})
    await second.submit({1: item(7)})
    first.close()
    await until(lambda: caching.opened() == 2)
    caching.open.set()
    assert await second.level(1) == 7
    assert caching.runner.ran == [1, 7]
    blocking.close()
    second.close()


async def test_a_lost_engine_ends_rpcs(remote: Rig) -> None:
    """Also those that wait for an answer; what comes later is refused at once."""
    assert isinstance(remote.sessions, RemoteSessions)
    idle, rpc = remote.session(), remote.session()
    await rpc.submit({key: item() for key in range(4)})
    waiting = asyncio.create_task(rpc.session.reserve(9, item()))
    await asyncio.sleep(0.05)
    remote.sessions.lost(Unavailable("gone"))
    with pytest.raises(Unavailable, match="gone"):
        await waiting
    assert [str(fault) for each in (idle, rpc) for fault in each.faults] == ["gone", "gone"]
    idle.close()
    rpc.close()
    remote.own.close()
    await asyncio.wait_for(remote.other.lost.wait(), SECONDS)
    with pytest.raises(Unavailable, match="ended"):
        await remote.session().submit({1: item()})
    assert remote.host
    remote.host.close()


async def test_a_process_that_is_gone_gives_everything_back(remote: Rig) -> None:
    remote.open.clear()
    rpcs = [remote.session() for _ in range(3)]
    await rpcs[0].upload(1, item(1))
    await rpcs[0].session.reserve(2, item(2))
    await rpcs[1].submit({1: item(3)})
    waiting = asyncio.create_task(rpcs[0].submit({key: item() for key in (5, 6)}))
    await asyncio.sleep(0.05)
    assert remote.host
    remote.host.close()
    waiting.cancel()
    await remote.settle()


def test_requests_before_the_model_is_loaded_are_refused() -> None:
    form = form_of(item())
    reply = not_ready(Reserve(1, 7, None, 1, form))
    assert isinstance(reply, Reply)
    assert reply.number == 7
    assert "loading" in str(unpickled(reply.error, Unavailable))
    assert not_ready(Close(1)) is None


def lookup(content_id: str) -> CacheLookup:
    return CacheLookup(content_id, None, None, DType.FLOAT32, 0.0)


async def test_a_session_that_waits_for_its_own_upload_can_be_closed(caching: Rig) -> None:
    """It ends alone: whoever waits for the same item is answered."""
    rpc, other = caching.session(), caching.session()
    await rpc.session.reserve(1, item(content_id="x"))
    for each in (rpc, other):
        await each.submit({2: lookup("x"), 3: lookup("x")})
    rpc.close()
    assert [type(await other.outcome(key)) for key in (2, 3)] == [NotCached, NotCached]
    other.close()
    await caching.settle()
    assert caching.local.single_flight._expected == {}


@pytest.mark.parametrize("seed", range(3))
async def test_sessions_that_join_each_other_leave_nothing_behind(caching: Rig, seed: int) -> None:
    """Uploads, lookups, releases and cancellations of equal names in any order."""
    chance = random.Random(seed)
    rpcs = [caching.session(caller=str(number)) for number in range(2)]
    for key in range(200):
        rpc, name = chance.choice(rpcs), chance.choice("xy")
        sent = item(chance.choice([1, 2, BAD, BROKEN]), content_id=name)
        task: asyncio.Task[object]
        match chance.choice(["reserve", "upload", "submit", "ask", "ask", "ask", "release", "close", "close"]):
            case "reserve":
                task = asyncio.ensure_future(rpc.session.reserve(key, sent))
            case "upload":
                task = asyncio.ensure_future(rpc.upload(key, sent))
            case "submit":
                task = asyncio.ensure_future(rpc.submit({key: sent}))
            case "ask":
                task = asyncio.ensure_future(rpc.submit({key: lookup(name)}))
            case "release":
                for each in list(rpc.outcomes):
                    rpc.forget(each)
                continue
            case _:
                rpc.close()
                rpcs[rpcs.index(rpc)] = caching.session(caller=str(key))
                continue
        with suppress(Overloaded, TimeoutError):
            await asyncio.wait_for(task, chance.choice([0.0, 0.001, 0.05]))
    for rpc in rpcs:
        rpc.close()
    await caching.settle()
    assert caching.local.single_flight._expected == {}
