"""An engine with everything before it, for sessions in its process and for those that are a link away."""

import asyncio
import gc
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from threading import Event, Thread
from typing import Any

import numpy as np

import cards
from vitwire_server.caching.cache import EmbeddingCache
from vitwire_server.caching.keys import digest_of, parts_of
from vitwire_server.caching.single_flight import SingleFlight
from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.errors import EncodeFailed, InvalidTensors
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import CacheLookup, DType, Embedding, Item, Modality, Pixels
from vitwire_server.core.models import Geometry, Limits
from vitwire_server.core.plans import Fallback
from vitwire_server.core.reports import Encoded, Outcome
from vitwire_server.core.runner import Collected, Running, Timings
from vitwire_server.observe.metrics import Metrics
from vitwire_server.scheduling.admission import Admission
from vitwire_server.scheduling.planner import Bounds, Planner
from vitwire_server.scheduling.scheduler import Scheduler
from vitwire_server.scheduling.tickets import Priority
from vitwire_server.sessions.arena import Arena, ArenaMemory
from vitwire_server.sessions.host import SessionHost
from vitwire_server.sessions.link import Link
from vitwire_server.sessions.local import LocalSessions
from vitwire_server.sessions.messages import FROM_ENGINE, FROM_RPC, ToEngine, ToRpc
from vitwire_server.sessions.remote import RemoteSessions
from vitwire_server.sessions.session import Opening, Session, Sessions

SECONDS = 30
WIDTH = 4
LIMITS = 4, 1 << 20
"""Items and bytes that are admitted."""
BAD, BROKEN = 66, 77
"""Pixels that cannot be encoded, and that break the tower."""


def item(level: int = 1, tokens: int = 4, content_id: str = "") -> Item:
    """An item of one level of grey, whose rows have that level too."""
    pixels = Pixels(bytes([level]) * (16 * tokens), DType.UINT8, (4 * tokens, 4))
    footprint = Footprint(4 * tokens, tokens, 1, 4 * tokens)
    return Item(Modality.IMAGE, Grid(1, 4, tokens), pixels, footprint, DType.FLOAT32, content_id=content_id)


def film(*levels: int) -> Item:
    pixels = Pixels(b"".join(bytes([level]) * 64 for level in levels), DType.UINT8, (16 * len(levels), 4))
    footprint = Footprint(16 * len(levels), 4 * len(levels), len(levels), 16)
    return Item(Modality.VIDEO, Grid(len(levels), 4, 4), pixels, footprint, DType.FLOAT32, in_groups=True)


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
        """Sessions over a link, with their own mapping of the arena; with `spares`, blocks are granted before."""
        arena = Arena(os.dup(self.memory.arena.descriptor))
        own, other = socket.socketpair()

        def to_engine(message: Any) -> None:
            host.receive(message)

        def to_rpc(message: Any) -> None:
            remote.receive(message)

        self.own: Link[ToEngine, ToRpc] = await Link.over(own, FROM_RPC, to_engine)
        self.other: Link[ToRpc, ToEngine] = await Link.over(other, FROM_ENGINE, to_rpc)
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


@asynccontextmanager
async def running(made: Rig, shape: str) -> AsyncIterator[Rig]:
    """The rig, with sessions of this shape; everything is given back at the end."""
    try:
        yield made if shape == "local" else await made.over_a_link(spares=shape == "spares")
        await made.settle_memory()
    finally:
        await made.close()


class Rpc:
    """A session, and what became of its items."""

    def __init__(self, rig: Rig, opening: Opening) -> None:
        self.rig = rig
        self.outcomes: dict[int, Outcome] = {}
        self.parts: list[tuple[int, list[float]]] = []  # first row and levels of each group of rows of a clip
        self.faults: list[Exception] = []
        self.session: Session = rig.sessions.open(opening, self.settle, self.faults.append)

    def settle(self, key: int, outcome: Outcome) -> None:
        assert key not in self.outcomes, "one outcome"
        if isinstance(outcome, Encoded) and outcome.new:
            levels = np.frombuffer(outcome.embedding.data, np.float32)[::WIDTH]
            self.parts.append((outcome.new[0], levels[slice(*outcome.new)].tolist()))
        if not (isinstance(outcome, Encoded) and outcome.is_partial):
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


CARD = replace(
    cards.CARD, geometry=Geometry(2, 2, 1, 1, WIDTH, 0), limits=Limits(1 << 20, 8, 1 << 10, *LIMITS), model_type="tiny"
)
