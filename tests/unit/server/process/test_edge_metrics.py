"""Metrics of several processes on one page."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from entered import entered
from readings import Readings
from vitwire_server.config.resolving import resolve
from vitwire_server.observe.metrics import Metrics, edges
from vitwire_server.observe.metrics.edges import EdgeMetrics, edge_metrics
from vitwire_server.process.serve import serve

EDGE = """
import sys
from vitwire_server.observe.metrics.edges import edge_metrics
metrics = edge_metrics()
count = 0
for line in sys.stdin:
    for _ in range(int(line)):
        metrics.requests.labels("Encode", "OK").inc()
        metrics.request_seconds.labels("Encode").observe(0.0021, {"request_id": "r"})
        metrics.inflight.inc()
        metrics.sent(0.02)
        metrics.send_cancelled()
        metrics.delivered(100)
    metrics.certificate_loaded(100.0 - int(line))
    print("done", flush=True)
"""


class Edge:
    """An edge process that records requests on demand."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", EDGE],
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def request(self, count: int) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(b"%d\n" % count)
        self.process.stdin.flush()
        assert self.process.stdout.readline() == b"done\n"

    def kill(self) -> int:
        self.process.kill()
        self.process.communicate()
        return self.process.pid


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


merged = entered(lambda metrics: closing(EdgeMetrics(metrics.registry)), scope="function")


@pytest.fixture
def start(merged: EdgeMetrics) -> Iterator[Callable[[], Edge]]:
    edges: list[Edge] = []

    def make() -> Edge:
        edges.append(Edge(merged.environment))
        return edges[-1]

    yield make
    for edge in edges:
        edge.kill()


def folder(merged: EdgeMetrics) -> Path:
    return Path(next(iter(merged.environment.values())))


def test_counts_add_up_and_outlive_their_process(
    metrics: Metrics, merged: EdgeMetrics, start: Callable[[], Edge]
) -> None:
    one, two = start(), start()
    one.request(3)
    two.request(4)
    metrics.rpc.requests.labels("Encode", "OK").inc(10)
    metrics.admission.changed(5, 500)

    def check(requests: int, inflight: int, expiry: float) -> None:
        readings = Readings(merged.registry)
        assert readings.total("vitwire_tls_certificate_expiry_timestamp_seconds") == expiry, "the earliest"
        assert readings.by("vitwire_requests_total", "code", method="Encode") == {"OK": requests}
        assert readings.total("vitwire_inflight_requests") == inflight
        assert readings.total("vitwire_cancelled_total", stage="send") == requests - 10
        assert readings.total("vitwire_delivered_bytes_total", way="stream") == (requests - 10) * 100
        assert readings.total("vitwire_request_seconds_count") == requests - 10
        assert readings.total("vitwire_request_seconds_sum") == pytest.approx((requests - 10) * 0.0021)
        assert readings.total("vitwire_stage_seconds_bucket", stage="send", le="0.02") == requests - 10
        assert readings.total("vitwire_request_seconds_bucket", method="Encode", le="0.002") == 0
        for bound in ("0.003", "+Inf"):
            assert readings.total("vitwire_request_seconds_bucket", method="Encode", le=bound) == requests - 10
        assert readings.total("vitwire_admitted_items") == 5, "the engine's own"

    check(17, 7, 96)
    merged.edge_ended(one.kill())
    check(17, 4, 96)
    again = start()
    again.request(1)
    check(18, 5, 96)
    merged.edge_ended(two.kill())
    merged.edge_ended(again.kill())
    check(18, 0, 0)
    assert [each.name for each in folder(merged).iterdir()] == ["lock"], "restarts leave no files"


def series(registry: CollectorRegistry) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.startswith(("process_", "vitwire_process"))
    }


def test_series_are_those_of_one_process(metrics: Metrics, merged: EdgeMetrics, start: Callable[[], Edge]) -> None:
    assert series(merged.registry) == series(metrics.registry), "closed label sets are visible without edges"
    start().request(1)
    metrics.rpc.requests.labels("Encode", "OK")
    metrics.rpc.request_seconds.labels("Encode")
    metrics.rpc.sent(1)
    assert series(merged.registry) == series(metrics.registry)


def test_both_formats_are_valid_and_no_series_comes_twice(
    metrics: Metrics, merged: EdgeMetrics, start: Callable[[], Edge]
) -> None:
    for edge in (start(), start()):
        edge.request(2)
    metrics.engine.item_waited(0.001)
    for families in (
        list(parse(generate_latest(merged.registry).decode())),
        list(parse_openmetrics(openmetrics(merged.registry).decode())),
    ):
        names = [family.name for family in families]
        assert len(names) == len(set(names))
        found = [(sample.name, frozenset(sample.labels.items())) for each in families for sample in each.samples]
        assert len(found) == len(set(found))
        assert ("vitwire_request_seconds_count", frozenset({("method", "Encode")})) in found


def test_scrapes_see_counts_only_grow_while_edges_come_and_go(merged: EdgeMetrics, start: Callable[[], Edge]) -> None:
    stop, seen = Event(), [0.0]

    def scrape() -> None:
        while not stop.is_set():
            seen.append(Readings(merged.registry).total("vitwire_requests_total"))

    with ThreadPoolExecutor(1) as pool:
        scraping = pool.submit(scrape)
        try:
            for _ in range(4):
                edge = start()
                edge.request(100)
                merged.edge_ended(edge.kill())
        finally:
            stop.set()
        scraping.result()
    assert seen == sorted(seen)
    assert Readings(merged.registry).total("vitwire_requests_total") == 400


def test_the_folder_is_private_and_removed(metrics: Metrics) -> None:
    merged = EdgeMetrics(metrics.registry)
    assert folder(merged).stat().st_mode & 0o777 == 0o700
    merged.close()
    assert not folder(merged).exists()
    assert Readings(merged.registry).total("vitwire_queue_limit_items") == 0, "still readable"


@pytest.fixture
def abandoned() -> Path:
    """The folder of an engine process that was killed."""
    engine = (
        "import os, signal\nfrom vitwire_server.observe.metrics import Metrics\n"
        "from vitwire_server.observe.metrics.edges import EdgeMetrics\n"
        "print(*EdgeMetrics(Metrics().registry).environment.values(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", engine],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    return Path(killed.stdout.strip())


def test_the_folder_of_a_killed_engine_is_removed_by_the_next(
    metrics: Metrics, merged: EdgeMetrics, abandoned: Path
) -> None:
    EdgeMetrics(metrics.registry).close()
    assert not abandoned.exists()
    assert folder(merged).exists(), "in use"


def test_without_its_environment_an_edge_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    with pytest.raises(RuntimeError, match="PROMETHEUS_MULTIPROC_DIR is not set"):
        edge_metrics()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_every_process_shows_its_cpu_time_memory_and_restarts(
    metrics: Metrics, merged: EdgeMetrics, start: Callable[[], Edge]
) -> None:
    memory, cpu = "vitwire_process_resident_memory_bytes", "vitwire_process_cpu_seconds_total"
    metrics.processes.expect(["rpc-0", "rpc-1"])
    edge = start()
    edge.request(1)
    metrics.processes.started("rpc-0", edge.process.pid)
    readings = Readings(merged.registry)
    assert set(readings.by(memory, "process")) == {"engine", "rpc-0"}
    assert all(value > 1e6 for value in readings.by(memory, "process").values())
    assert all(value > 0 for value in readings.by(cpu, "process").values())
    assert readings.by("vitwire_process_restarts_total", "process") == {"rpc-0": 0, "rpc-1": 0}
    edge.kill()
    assert set(Readings(merged.registry).by(cpu, "process")) == {"engine"}, "it died, and `ended` was not called yet"
    metrics.processes.ended("rpc-0")
    metrics.processes.started("rpc-0", os.getpid())
    assert Readings(merged.registry).by("vitwire_process_restarts_total", "process") == {"rpc-0": 1, "rpc-1": 0}


def test_files_have_their_pages_before_they_are_written(merged: EdgeMetrics, start: Callable[[], Edge]) -> None:
    """A write to a page of a full file system would end the edge with SIGBUS."""
    start().request(1)
    files = list(folder(merged).glob("*.db"))
    assert len(files) == 4
    assert all(each.stat().st_blocks * 512 >= each.stat().st_size > 0 for each in files)


@pytest.mark.parametrize("room", [0, 1 << 62])
def test_files_lie_where_there_is_room(
    metrics: Metrics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    in_memory, elsewhere = tmp_path / "memory", tmp_path / "elsewhere"
    in_memory.mkdir()
    elsewhere.mkdir()
    monkeypatch.setattr(edges, "_IN_MEMORY", in_memory)
    monkeypatch.setattr(edges, "_ROOM", room)
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    with closing(EdgeMetrics(metrics.registry)) as made:
        assert folder(made).parent == (elsewhere if room else in_memory)


@pytest.mark.parametrize("flag", ["--host", "--metrics-host"])
def test_a_server_that_cannot_listen_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setattr(edges, "_IN_MEMORY", tmp_path)
    ports = ["--port", "0", "--metrics-port", "0"]
    settings = resolve(["--model", "m", "--rpc-processes", "2", *ports, flag, "203.0.113.7"])
    with pytest.raises(OSError, match=r"cannot listen on 203\.0\.113\.7"):
        asyncio.run(serve(settings))
    assert not list(tmp_path.iterdir())
