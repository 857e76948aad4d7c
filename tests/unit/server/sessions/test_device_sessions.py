"""Sessions whose rows are on the engine's device, without an engine that runs. The device is the CPU."""

import asyncio
import ctypes
from collections.abc import Callable, Sequence
from threading import Event, Thread

import pytest
import torch

from cards import CARD
from session_rig import until
from vitwire_server.caching.cache import Content, EmbeddingCache, Key, Name
from vitwire_server.caching.downloads import Downloads
from vitwire_server.caching.single_flight import SingleFlight
from vitwire_server.core.budgets import Ladder
from vitwire_server.core.delivery import (
    Consumer,
    Delivered,
    DeviceRows,
    Fallback,
    MemoryKind,
    NotDelivered,
    Placing,
    Region,
    Rows,
    Stored,
)
from vitwire_server.core.errors import EncodeFailed
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import CacheLookup, DType, Embedding, Modality
from vitwire_server.core.plans import Fallback as Eager
from vitwire_server.core.reports import Encoded, Outcome
from vitwire_server.observe.metrics import Metrics
from vitwire_server.runtime.memory.outbox import Outbox
from vitwire_server.scheduling.admission import Admission
from vitwire_server.scheduling.forecast import Forecast
from vitwire_server.scheduling.intake import Intake
from vitwire_server.scheduling.planner import Bounds, Planner
from vitwire_server.scheduling.tickets import Priority
from vitwire_server.sessions.local import LocalSession, LocalSessions
from vitwire_server.sessions.session import Opening

PAGE = 4096
ROWS = bytes(range(32))
NAME = Name("", "", DType.FLOAT32, 1.0, "clip")
REGION = Region(64, 32)
HOST = Consumer("", "agent", b"", MemoryKind.HOST, 0, PAGE, PAGE)
DEVICE = Consumer("", "agent", b"", MemoryKind.DEVICE, 0, PAGE, PAGE)


def lookup(region: Region | None = None, *, store_only: bool = False) -> CacheLookup:
    return CacheLookup("clip", None, None, DType.FLOAT32, 1.0, region, store_only)


class Courier:
    """Delivers nothing, and says so in a thread of its own after it has released the rows."""

    def __init__(self, outcome: Delivered | NotDelivered) -> None:
        self.outcome = outcome
        self.delivered: list[bytes] = []
        self.uploads = 0

    def deliver(self, placing: Placing, rows: Rows, done: Callable[[Delivered | NotDelivered], None]) -> None:
        assert placing.region == REGION
        assert rows.is_ready()

        def run() -> None:
            self.delivered.append(ctypes.string_at(rows.address, rows.nbytes))
            rows.release()
            done(self.outcome)

        Thread(target=run).start()

    def upload(self, data: memoryview) -> DeviceRows | Fallback:
        del data
        self.uploads += 1
        return Fallback.OFF

    def refuse(self, reason: Fallback, done: Callable[[Delivered | NotDelivered], None]) -> None:
        done(NotDelivered(reason))


class Hooked:
    """Rows of the outbox; `hook` is called before they are copied to the host."""

    def __init__(self, rows: DeviceRows, hook: Callable[[], None]) -> None:
        self.address, self.nbytes, self.taken, self.device = rows.address, rows.nbytes, rows.taken, rows.device
        self._rows, self._hook = rows, hook

    def is_ready(self) -> bool:
        return self._rows.is_ready()

    def download(self) -> memoryview:
        self._hook()
        return self._rows.download()


class Rig:
    """An engine in which rows that `lookup` names are on the device only."""

    def __init__(self, courier: Courier | None = None, hook: Callable[[], None] = lambda: None) -> None:
        self.outbox = Outbox(torch.device("cpu"), PAGE)
        self.admission = Admission(max_items=4, max_bytes=1 << 20)
        self.metrics = Metrics()
        self.settled: list[tuple[int, Outcome]] = []
        downloads = Downloads(self.metrics.cache.downloaded)
        self.cache = EmbeddingCache(1 << 20, max_stored=PAGE, download=downloads.start)
        rows = self.outbox.copied(torch.frombuffer(bytearray(ROWS), dtype=torch.uint8))
        assert rows
        key = Key("", "", DType.FLOAT32, 1.0, Content(Modality.IMAGE, Grid(1, 2, 2), (), b""))
        self.cache.put(key, Embedding(memoryview(b""), DType.FLOAT32, (1, 8), device=Hooked(rows, hook)), {NAME})
        planner = Planner(Ladder(), Bounds(100, 64, 64), without_graph=Eager.GRAPHS_OFF)
        intake = Intake(planner, Forecast(), self.metrics.engine, lambda: 0.0)
        flight = SingleFlight(self.cache, self.metrics.cache)
        self.sessions = LocalSessions(CARD, intake, self.admission, flight, self.metrics.admission, courier=courier)

    def open(self, consumer: Consumer | None = None) -> LocalSession:
        opening = Opening("", "", None, Priority.INTERACTIVE, "", consumer)
        return self.sessions.open(opening, lambda *settled: self.settled.append(settled), lambda _: None)

    async def outcomes(self, count: int = 1) -> Sequence[Outcome]:
        await until(lambda: len(self.settled) >= count)
        return [outcome for _, outcome in self.settled]

    async def encoded(self) -> Encoded:
        (outcome,) = await self.outcomes()
        assert isinstance(outcome, Encoded)
        assert outcome.embedding.device is None, "a client that reads slowly would hold its memory"
        return outcome

    def copied(self) -> float:
        return self.metrics.registry.get_sample_value("vitwire_copied_bytes_total", {"to": "host"}) or 0.0

    def from_device(self) -> float:
        return self.metrics.registry.get_sample_value("vitwire_store_hits_total") or 0.0


async def test_rows_are_copied_to_the_host_for_a_response_and_stay_in_both_places() -> None:
    rig = Rig()
    session = rig.open()
    for key in (1, 2):
        await session.submit({key: lookup()}, {})
    first, second = await rig.outcomes(2)
    await session.submit({3: lookup()}, {})
    for outcome in (first, second, rig.settled[2][1]):
        assert isinstance(outcome, Encoded)
        assert bytes(outcome.embedding.data) == ROWS
    assert (rig.copied(), rig.cache.stored_nbytes) == (32, PAGE)
    session.close()
    assert rig.admission.held == (0, 0)


async def test_what_only_asks_whether_rows_are_cached_copies_nothing() -> None:
    rig = Rig()
    await rig.open().submit({1: lookup(store_only=True)}, {})
    outcome = await rig.encoded()
    assert (outcome.delivery, len(outcome.embedding.data), rig.copied()) == (Stored(), 0, 0)


async def test_rows_are_delivered_from_the_device_and_stay_there() -> None:
    rig = Rig(courier := Courier(Delivered(REGION, 0.1)))
    await rig.open(HOST).submit({1: lookup(REGION)}, {})
    assert isinstance((await rig.encoded()).delivery, Delivered)
    assert courier.delivered == [ROWS]
    assert (rig.copied(), rig.from_device(), courier.uploads) == (0, 1, 0)
    assert rig.outbox.copied(torch.empty(1, dtype=torch.uint8)) is None


async def test_rows_that_were_not_delivered_come_in_the_response() -> None:
    rig = Rig(Courier(NotDelivered(Fallback.FAILED)))
    await rig.open(HOST).submit({1: lookup(REGION)}, {})
    outcome = await rig.encoded()
    assert outcome.delivery == NotDelivered(Fallback.FAILED)
    assert bytes(outcome.embedding.data) == ROWS
    assert (rig.copied(), rig.from_device()) == (32, 0)


async def test_rows_in_another_kind_of_memory_go_by_the_host() -> None:
    """The engine is on the CPU, the consumer's memory on a device: only an upload could deliver them."""
    rig = Rig(courier := Courier(Delivered(REGION, 0.1)))
    await rig.open(DEVICE).submit({1: lookup(REGION)}, {})
    outcome = await rig.encoded()
    assert outcome.delivery == NotDelivered(Fallback.OFF)
    assert bytes(outcome.embedding.data) == ROWS
    assert (rig.copied(), rig.from_device(), courier.uploads, courier.delivered) == (32, 0, 1, [])


@pytest.mark.parametrize("consumer", [None, HOST])
async def test_a_caller_that_leaves_while_its_rows_are_copied_gets_nothing_and_holds_nothing(
    consumer: Consumer | None,
) -> None:
    begun, go_on = Event(), Event()

    def block() -> None:
        begun.set()
        assert go_on.wait(60)

    rig = Rig(Courier(NotDelivered(Fallback.FAILED)), block)
    session = rig.open(consumer)
    await session.submit({1: lookup(REGION if consumer else None)}, {})
    await asyncio.to_thread(begun.wait, 60)
    session.close()
    assert rig.admission.held == (0, 0)
    go_on.set()
    await until(rig.copied)
    assert not rig.settled
    del session
    rig.cache._max_stored = 0
    rig.cache._shrink()
    assert rig.outbox.copied(torch.empty(1, dtype=torch.uint8)), "nothing else holds the rows"


async def test_rows_that_cannot_be_copied_fail_their_items_only() -> None:
    def fail() -> None:
        raise MemoryError

    rig = Rig(Courier(Delivered(REGION, 0.1)), fail)
    session = rig.open(HOST)
    await session.submit({1: lookup()}, {})
    (failed,) = await rig.outcomes()
    assert isinstance(failed, EncodeFailed)
    await session.submit({2: lookup(REGION)}, {})
    _, other = await rig.outcomes(2)
    assert isinstance(other, Encoded)
    session.close()
    assert rig.admission.held == (0, 0)
