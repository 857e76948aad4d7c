"""Delivery of rows through NIXL, to consumers in processes of their own."""

import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from queue import SimpleQueue

import numpy as np
import psutil
import pytest
from prometheus_client import CollectorRegistry

from nixl_consumer import ConsumerProcess, consuming
from vitwire.shared.agents import AgentError, Memory, is_installed, problem_of
from vitwire.shared.regions import ALIGNMENT, Regions
from vitwire_server.core.delivery import Consumer, Delivered, Fallback, MemoryKind, NotDelivered, Placing, Region
from vitwire_server.delivery import cuda
from vitwire_server.delivery.courier import Courier
from vitwire_server.delivery.messages import Outbox, ToSender, Write
from vitwire_server.delivery.senders import Sender
from vitwire_server.delivery.transfers import Bounds, Job
from vitwire_server.observe.metrics.series import Series
from vitwire_server.observe.metrics.sessions import DeliveryMetrics
from waiting import until

pytestmark = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed")
MIB = 1 << 20
SECONDS = 60
"""Patience with a machine whose cores are busy."""


class HostRows:
    """Rows in memory of this process."""

    def __init__(self, value: int, nbytes: int) -> None:
        self.array = np.full(nbytes, value, np.uint8)
        self.released = threading.Event()
        self.ready = True
        self.address, self.nbytes, self.device = self.array.ctypes.data, nbytes, None

    def is_ready(self) -> bool:
        return self.ready

    def release(self) -> None:
        assert not self.released.is_set(), "released once"
        self.released.set()


class Deliveries:
    """A courier whose outcomes arrive in a queue."""

    def __init__(self, courier: Courier, registry: CollectorRegistry) -> None:
        self.courier = courier
        self.registry = registry
        self.outcomes: SimpleQueue[Delivered | NotDelivered] = SimpleQueue()

    def post(self, consumer: Consumer, rows: HostRows, offset: int = 0, nbytes: int = 0) -> None:
        self.courier.deliver(Placing(consumer, Region(offset, nbytes or rows.nbytes)), rows, self.outcomes.put)

    def next(self) -> Delivered | NotDelivered:
        return self.outcomes.get(timeout=SECONDS)

    def deliver(self, consumer: Consumer, rows: HostRows, offset: int = 0) -> Delivered | NotDelivered:
        self.post(consumer, rows, offset)
        return self.next()

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"vitwire_{name}", labels) or 0.0


@contextmanager
def delivering(**bounds: float) -> Iterator[Deliveries]:
    registry = CollectorRegistry()
    series = Series(registry)
    courier = Courier(DeliveryMetrics(series), Bounds(**bounds))
    try:
        yield Deliveries(courier, registry)
    finally:
        courier.close()


# -- regions ---------------------------------------------------------------------------------------


def test_regions_are_apart_and_reused() -> None:
    regions = Regions(10 * ALIGNMENT)
    taken = [regions.take(n) for n in (1, ALIGNMENT, ALIGNMENT + 1, 6 * ALIGNMENT)]
    spans = [range(each.offset, each.end) for each in taken if each]
    assert len(spans) == 4
    assert all(a.stop <= b.start for a, b in pairwise(spans))
    assert regions.take(1) is None
    assert regions.free == 0
    for each in (taken[2], taken[0], taken[3], taken[1]):
        assert each
        regions.give_back(each)
    assert regions.take(10 * ALIGNMENT) is not None


def test_regions_survive_random_use() -> None:
    random = np.random.default_rng(7)
    regions, taken = Regions(64 * ALIGNMENT), []
    for _ in range(2000):
        if taken and random.random() < 0.5:
            regions.give_back(taken.pop(random.integers(len(taken))))
        elif region := regions.take(int(random.integers(1, 9 * ALIGNMENT))):
            taken.append(region)
        ordered = sorted(taken)
        assert all(a.end <= b.offset for a, b in pairwise(ordered))
        assert regions.free + sum(each.nbytes for each in taken) == regions.size


# -- checks ----------------------------------------------------------------------------------------


def test_regions_outside_of_the_delivery_are_found() -> None:
    consumer = Consumer("", "a", b"", MemoryKind.HOST, 0, 4096, 1000)
    assert Region(0, 1000).problem(consumer, 1000) is None
    assert "not within" in (Region(1, 1000).problem(consumer, 10) or "")
    assert "not within" in (Region((1 << 64) - 1, (1 << 64) - 1).problem(consumer, 10) or "")
    assert "has 8 bytes, the rows have 10" in (Region(0, 8).problem(consumer, 10) or "")
    assert consumer.problem() is None
    assert "beyond" in (Consumer("", "a", b"", MemoryKind.HOST, 0, (1 << 64) - 10, 11).problem() or "")


def test_metadata_must_be_of_the_agent_that_is_named() -> None:
    metadata = b"nixlSerDes|Agent" + (5).to_bytes(8, "little") + b"alice|Conns..."
    assert problem_of("alice", metadata) is None
    for name in ("bob", "alic", "alice|", "", "x" * 65, "\N{SNOWMAN}", "a/b"):
        assert problem_of(name, metadata)
    assert "65537 bytes" in (problem_of("alice", metadata.ljust((64 << 10) + 1)) or "")


# -- process to process ----------------------------------------------------------------------------


def test_rows_arrive_where_they_belong() -> None:
    with delivering() as deliveries, consuming(16 * MIB) as process:
        consumer = process.consumer()
        first, second = HostRows(3, 2 * MIB + 13), HostRows(7, MIB)
        assert isinstance(deliveries.deliver(consumer, first, 4 * MIB), Delivered)
        assert isinstance(deliveries.deliver(consumer, second, 8 * MIB), Delivered)
        assert first.released.wait(SECONDS)
        assert second.released.wait(SECONDS)
        assert process.sums(0, 16 * MIB) == {"0": 13 * MIB - 13, "3": 2 * MIB + 13, "7": MIB}
        assert deliveries.metric("delivered_bytes_total", way="nixl") == 3 * MIB + 13
        assert deliveries.metric("delivery_agents") == 1


def test_rows_are_sent_once_they_are_ready() -> None:
    with delivering() as deliveries, consuming(MIB) as process:
        rows = HostRows(1, MIB)
        rows.ready = False
        deliveries.post(process.consumer(), rows)
        time.sleep(0.3)
        assert deliveries.outcomes.empty()
        rows.ready = True
        assert isinstance(deliveries.next(), Delivered)


def test_a_consumer_that_is_killed_costs_its_own_rows_only() -> None:
    with (
        delivering(seconds=SECONDS / 4, idle_seconds=5) as deliveries,  # UCX does not notice every death
        consuming(64 * MIB) as killed,
        consuming(MIB) as other,
    ):
        assert isinstance(deliveries.deliver(killed.consumer(), HostRows(1, MIB)), Delivered)
        many = [HostRows(1, 16 * MIB) for _ in range(20)]
        for rows in many:
            deliveries.post(killed.consumer(), rows)
        killed.kill()
        outcomes = [deliveries.next() for _ in many]
        assert isinstance(outcomes[-1], NotDelivered)
        reasons = {each.reason for each in outcomes if isinstance(each, NotDelivered)}
        assert reasons <= {
            Fallback.FAILED,
            Fallback.REFUSED,
            Fallback.TIMEOUT,
        }  # refused: posted after the disconnection
        if Fallback.TIMEOUT not in reasons:  # rows whose transfer may still end are kept
            assert all(rows.released.wait(SECONDS) for rows in many)
        assert isinstance(deliveries.deliver(other.consumer(), HostRows(2, MIB)), Delivered)
        until(lambda: deliveries.metric("delivery_agents") <= 1)


def test_memory_that_is_not_registered_is_not_written() -> None:
    with delivering() as deliveries, consuming(MIB) as liar:
        assert deliveries.deliver(liar.consumer(nbytes=2 * MIB), HostRows(1, MIB), offset=MIB) == NotDelivered(
            Fallback.FAILED
        )
        assert liar.sums(0, MIB) == {"0": MIB}


def test_delivery_survives_a_factory_that_is_killed_and_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with delivering() as deliveries, consuming(MIB) as process:
        assert isinstance(deliveries.deliver(process.consumer(), HostRows(1, MIB)), Delivered)
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        (factory,) = _factories()
        senders = factory.children()
        factory.kill()
        until(lambda: not any(each.is_running() and each.status() != "zombie" for each in senders))
        assert isinstance(deliveries.deliver(process.consumer(), HostRows(2, MIB)), NotDelivered)
        monkeypatch.undo()
        assert isinstance(_once_connected(deliveries, process), Delivered)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sender_that_ends_or_hangs_costs_its_deliveries_only(number: signal.Signals) -> None:
    with delivering(seconds=3) as deliveries, consuming(MIB) as process, consuming(MIB) as other:
        assert isinstance(_once_connected(deliveries, process), Delivered)
        (factory,) = _factories()
        until(lambda: len(factory.children()) == 2)  # the principal's, which began first, and a spare
        min(factory.children(), key=psutil.Process.create_time).send_signal(number)
        outcome = deliveries.deliver(process.consumer(), HostRows(1, MIB))
        assert isinstance(outcome, NotDelivered) or number is signal.SIGKILL, "its death may be noticed before"
        assert isinstance(_once_connected(deliveries, other), Delivered)


def test_a_first_delivery_does_not_wait_forever() -> None:
    with delivering(waiting_seconds=0.2) as deliveries, consuming(MIB) as process:
        deliveries.courier._transfers.senders.take = lambda: None  # type: ignore[method-assign]  # none is ever ready
        rows = HostRows(1, MIB)
        assert deliveries.deliver(process.consumer(), rows) == NotDelivered(Fallback.TIMEOUT)
        assert rows.released.is_set()


def _has_ended(sender: Sender) -> bool:
    try:
        return not sender.link.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("is_posted", [True, False])
def test_metadata_that_ends_a_process_ends_only_the_trial(is_posted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX aborts on addresses of an unknown version, perhaps before the transfer is asked for."""
    send, held = Sender.send, []

    def sent(sender: Sender, message: ToSender) -> bool:
        if isinstance(message, Write) and not is_posted and not held:
            held.append(message)
            until(lambda: _has_ended(sender))
        return send(sender, message)

    monkeypatch.setattr(Sender, "send", sent)
    with delivering(seconds=SECONDS) as deliveries, consuming(MIB) as process:
        wrong = bytearray(process.metadata)
        start = wrong.index(b"UCX|c") + 5 + 8
        wrong[start : start + 8] = b"\xff" * 8
        for _ in range(2):
            outcome = deliveries.deliver(process.consumer(metadata=bytes(wrong)), HostRows(1, MIB))
            assert outcome == NotDelivered(Fallback.REFUSED)
        with consuming(MIB) as other:
            assert isinstance(deliveries.deliver(other.consumer(), HostRows(1, MIB)), Delivered)


def _factories() -> list[psutil.Process]:
    """Other tests of this process may have left children that have ended."""
    living = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    return [each for each in living if "vitwire_server.delivery.factory" in each.cmdline()]


def test_agents_belong_to_the_principal_that_named_them_first() -> None:
    with delivering() as deliveries, consuming(MIB) as process:
        assert isinstance(deliveries.deliver(process.consumer("alice"), HostRows(1, MIB)), Delivered)
        refused = NotDelivered(Fallback.REFUSED)
        assert deliveries.deliver(process.consumer("mallory"), HostRows(9, MIB)) == refused
        assert (
            deliveries.deliver(process.consumer("alice", metadata=process.metadata + b"x"), HostRows(9, 9)) == refused
        )
        assert isinstance(deliveries.deliver(process.consumer("alice"), HostRows(2, MIB)), Delivered)
        assert process.sums(0, MIB) == {"2": MIB}
        assert deliveries.metric("delivery_fallbacks_total", reason="refused") == 2


def test_a_silent_agent_gets_nothing_that_replaced_its_rows() -> None:
    """UCX goes on to send what it has queued, from the memory of rows whose transfer was released."""
    with delivering(seconds=1) as deliveries, consuming(64 * MIB) as silent, consuming(MIB) as other:
        assert isinstance(_once_connected(deliveries, silent), Delivered)
        assert isinstance(_once_connected(deliveries, other), Delivered)
        silent.stop()
        rows = HostRows(3, 64 * MIB)
        assert deliveries.deliver(silent.consumer(), rows) == NotDelivered(Fallback.TIMEOUT)
        assert deliveries.deliver(silent.consumer(), HostRows(4, MIB)) == NotDelivered(Fallback.TIMEOUT)
        assert isinstance(deliveries.deliver(other.consumer(), HostRows(5, MIB)), Delivered)
        silent.resume()
        until(lambda: set(silent.sums(0, 64 * MIB)) == {"3"})
        until(lambda: deliveries.metric("delivery_agents") <= 1)


def test_too_many_silent_agents_cost_a_new_sender() -> None:
    with (
        delivering(seconds=1, overdue_bytes=32 * MIB) as deliveries,
        consuming(64 * MIB) as silent,
        consuming(MIB) as other,
    ):
        assert isinstance(_once_connected(deliveries, silent), Delivered)
        (sender,) = deliveries.courier._transfers._assignments.shared.values()
        silent.stop()
        assert deliveries.deliver(silent.consumer(), HostRows(3, 64 * MIB)) == NotDelivered(Fallback.TIMEOUT)
        until(lambda: sender.is_gone)
        silent.resume()
        assert isinstance(_once_connected(deliveries, other), Delivered)


def _once_connected(deliveries: Deliveries, process: ConsumerProcess) -> Delivered | NotDelivered:
    """Connections and vetting take their time where cores are busy."""
    deadline = time.monotonic() + SECONDS
    while True:
        outcome = deliveries.deliver(process.consumer(), HostRows(1, 1))
        if isinstance(outcome, Delivered) or time.monotonic() > deadline:
            return outcome
        time.sleep(0.2)


def test_bounds_are_kept() -> None:
    with delivering(deliveries=2, staging_bytes=MIB, seconds=SECONDS) as deliveries, consuming(MIB) as process:
        assert deliveries.deliver(process.consumer(), HostRows(1, 2 * MIB)) == NotDelivered(Fallback.BUSY)
        waiting = [HostRows(1, MIB) for _ in range(2)]
        for rows in waiting:
            rows.ready = False
            deliveries.post(process.consumer(), rows)
        assert deliveries.deliver(process.consumer(), HostRows(1, 1)) == NotDelivered(Fallback.BUSY)
        for rows in waiting:  # both need all the room for copies, one after the other
            rows.ready = True
        assert {type(deliveries.next()) for _ in waiting} == {Delivered}


def test_closing_answers_everything() -> None:
    with delivering(seconds=SECONDS) as deliveries, consuming(MIB) as process:
        rows = HostRows(1, MIB)
        rows.ready = False
        deliveries.post(process.consumer(), rows)
        deliveries.courier.close()
        assert deliveries.next() == NotDelivered(Fallback.OFF)
        assert rows.released.is_set()
        assert deliveries.deliver(process.consumer(), HostRows(1, 1)) == NotDelivered(Fallback.OFF)


def test_an_unexpected_error_answers_everything() -> None:
    class BrokenRows(HostRows):
        def is_ready(self) -> bool:
            raise ValueError("broken")

    with delivering() as deliveries, consuming(MIB) as process:
        deliveries.post(process.consumer(), BrokenRows(1, 1000))
        deliveries.post(process.consumer(), BrokenRows(2, 1000), offset=8192)
        assert {type(deliveries.next()) for _ in range(2)} == {NotDelivered}
        assert deliveries.deliver(process.consumer(), HostRows(3, 1000)) == NotDelivered(Fallback.OFF)


@pytest.mark.parametrize("fault", [OSError, None])
def test_a_courier_that_is_off_or_fails_takes_no_device(
    fault: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server waits for the answer before it is ready."""
    raised: SimpleQueue[Exception] = SimpleQueue()

    def fail(_: object) -> None:
        assert fault
        raise fault

    with delivering() as deliveries:
        if fault:
            monkeypatch.setattr(cuda, "make_current", fail)
        else:
            deliveries.courier.close()

        def add() -> None:
            try:
                deliveries.courier.add_device(Memory(0, 1, 0), Outbox(0, 1, b"", 0), lambda _: None)
            except Exception as error:  # noqa: BLE001 - whatever it raises
                raised.put(error)

        threading.Thread(target=add, daemon=True).start()
        assert isinstance(raised.get(timeout=SECONDS / 4), fault or AgentError)
        deliveries.courier.close()


def test_consumers_come_and_go() -> None:
    """Memory and descriptors stay flat; the agent that was unused for longest makes room."""
    own = psutil.Process()
    used = []
    with delivering(agents=2, seconds=SECONDS) as deliveries:
        for _ in range(5):
            with consuming(MIB) as process:
                assert isinstance(deliveries.deliver(process.consumer(), HostRows(1, MIB)), Delivered)
            used.append((own.memory_info().rss, own.num_fds()))
        assert deliveries.metric("delivery_agents") <= 2
    assert used[-1][0] - used[2][0] < 16 * MIB
    assert used[-1][1] - used[2][1] < 16


@pytest.mark.parametrize(("seconds", "level"), [(0.0005, "INFO"), (0.05, "WARNING")])
def test_the_rate_is_logged_once(seconds: float, level: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of embeddings of 8 MiB from device memory: 16 GB/s, or 0.16 GB/s over emulated TCP."""
    with delivering() as deliveries, caplog.at_level("INFO", Courier.__module__):
        for _ in range(40):
            now, consumer = time.monotonic(), Consumer("p", "a", b"", MemoryKind.DEVICE, 0, 0, 8 * MIB)
            job = Job(Placing(consumer, Region(0, 8 * MIB)), HostRows(0, 8 * MIB), now, posted=now - seconds)
            deliveries.courier._done[job] = deliveries.outcomes.put
            deliveries.courier._answer(job, None)
    assert [each.levelname for each in caplog.records] == [level]
    assert "GB/s into clients' devices" in caplog.text
