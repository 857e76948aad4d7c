"""Metrics over OTLP: a real server and router, and a collector that takes them, refuses them, hangs or is away."""

import math
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric
from prometheus_client.parser import text_string_to_metric_families

from checkpoints import Checkpoints
from collectors import Collector, collecting
from routers import client_of, engine, picture, router, user
from servers import ServerProcess, serving
from vitwire import Client, Item

COLUMNS = 3 * 2 * 14 * 14
OF_THE_MOMENT = ("process_", "vitwire_process_")
"""Families whose values change between two reads of a server that does nothing."""
Labels = tuple[tuple[str, str], ...]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "200")


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


def item() -> Item:
    return Item(np.random.default_rng().random((16, COLUMNS), np.float32), (1, 8, 2))


def points(metric: Metric) -> dict[Labels, Any]:
    """The points of a metric by their attributes."""
    kind = getattr(metric, metric.WhichOneof("data") or "")
    found = {tuple(sorted((a.key, a.value.string_value) for a in each.attributes)): each for each in kind.data_points}
    assert len(found) == len(kind.data_points), metric.name
    return found


def value(metric: Metric, **labels: str) -> float:
    """The sum of the numbers that have these labels."""
    found = points(metric).items()
    return float(sum(each.as_double for key, each in found if labels.items() <= dict(key).items()))


def assert_equals_page(exported: dict[str, Metric], page: str) -> set[str]:
    """All series of a page of metrics are in an export with their values, and no others; returns the kinds seen."""
    kinds, seen = set(), set()
    for family in text_string_to_metric_families(page):
        if family.type == "histogram":
            if family.samples:
                seen.add(family.name)
                assert_histogram(exported[family.name], family)
                kinds.add("histogram")
            continue
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            seen.add(sample.name)
            metric = exported[sample.name]
            kinds.add(metric.WhichOneof("data"))
            expected = "sum" if family.type == "counter" else "gauge"
            assert metric.WhichOneof("data") == expected, sample.name
            point = points(metric)[tuple(sorted(sample.labels.items()))]
            if not sample.name.startswith(OF_THE_MOMENT):
                same = point.as_double == sample.value or (math.isnan(point.as_double) and math.isnan(sample.value))
                assert same, (sample, point)
            if expected == "sum":
                assert metric.sum.is_monotonic
                assert metric.sum.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
                assert 0 < point.start_time_unix_nano < point.time_unix_nano
            assert metric.description == family.documentation
    assert seen == exported.keys()
    return kinds


def assert_histogram(metric: Metric, family: Any) -> None:
    assert metric.histogram.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    found = points(metric)
    named: dict[Labels, dict[str, float]] = {}
    for sample in family.samples:
        labels = tuple(sorted(each for each in sample.labels.items() if each[0] != "le"))
        if not sample.name.endswith("_created"):
            suffix = sample.labels.get("le") or sample.name.rpartition("_")[2]
            named.setdefault(labels, {})[suffix] = sample.value
    assert found.keys() == named.keys()
    for labels, point in found.items():
        values = named[labels]
        assert (point.count, point.sum) == (values.pop("count"), pytest.approx(values.pop("sum")))
        assert sum(point.bucket_counts) == point.count
        cumulative = dict(zip([*point.explicit_bounds, math.inf], np.cumsum(point.bucket_counts), strict=True))
        assert cumulative == {float(bound): count for bound, count in values.items()}, (metric.name, labels)
        assert not point.HasField("min")


UNITS = {"vitwire_request_seconds": "s", "vitwire_delivered_bytes_total": "By", "vitwire_items_total": ""}


@pytest.mark.parametrize("processes", [1, 2])
def test_a_server_exports_its_page(checkpoints: Checkpoints, collector: Collector, processes: int) -> None:
    flags = ("--dtype", "float32", "--rpc-processes", str(processes), "--otlp-endpoint", collector.endpoint)
    collector.metrics.exports.clear()
    collector.metrics.resources.clear()
    with serving(checkpoints("qwen2_vl"), *flags) as server, Client(server.target) as client:
        client.encode([item(), item()])
        first = collector.metrics.next()
        exported = collector.metrics.next()
        assert assert_equals_page(exported, server.page("/metrics")[1]) == {"sum", "gauge", "histogram"}
        assert {name: exported[name].unit for name in UNITS} == UNITS
        assert value(exported["vitwire_items_total"]) == 2
        assert value(exported["vitwire_requests_total"], method="Encode", code="OK") == 1
        client.encode([item()])
        later = collector.metrics.next()
        assert value(later["vitwire_items_total"]) == 3
        assert_counts_grow(first, later)
        client.encode([item()])
        assert server.stop() == 0
    last = collector.metrics.exports[-1]
    assert value(last["vitwire_items_total"]) == 4, "the last values are sent at the end"
    assert value(last["vitwire_requests_total"], method="Encode", code="OK") == 3, "with the counts of ended processes"
    assert_counts_grow(later, last)
    assert {each["service.name"] for each in collector.metrics.resources} == {"vitwire-server"}
    assert len({each["service.instance.id"] for each in collector.metrics.resources}) == 1
    assert all(each["service.version"] for each in collector.metrics.resources)


def assert_counts_grow(before: dict[str, Metric], after: dict[str, Metric]) -> None:
    for name, metric in before.items():
        if metric.WhichOneof("data") == "sum" and "_process_" not in name:
            later = points(after[name])
            for labels, point in points(metric).items():
                assert later[labels].as_double >= point.as_double, name
                assert later[labels].start_time_unix_nano == point.start_time_unix_nano


def test_a_router_exports_its_page(checkpoints: Checkpoints, collector: Collector) -> None:
    collector.metrics.exports.clear()
    collector.metrics.resources.clear()
    with (
        serving(checkpoints("qwen3_vl")) as server,
        engine() as stand_in,
        router(server.target, stand_in.url, "--otlp-endpoint", collector.endpoint) as proxy,
        client_of(proxy) as llm,
    ):
        llm.chat.completions.create(model="m", messages=user(picture(), picture(seed=1)))
        llm.chat.completions.create(model="m", messages=user())
        exported = collector.metrics.next()
        assert assert_equals_page(exported, proxy.page("/metrics")[1]) == {"sum", "gauge", "histogram"}
        assert value(exported["vitwire_router_images_total"], source="data", result="loaded") == 2
        assert exported["vitwire_router_stage_seconds"].unit == "s"
        assert exported["vitwire_router_buffered_bytes"].unit == "By"
        llm.models.list()
        assert proxy.stop() == 0
    last = collector.metrics.exports[-1]["vitwire_router_requests_total"]
    assert (value(last, route="chat"), value(last, route="proxied")) == (2, 1)
    assert {each["service.name"] for each in collector.metrics.resources} == {"vitwire-router"}


def test_variables_of_the_sdk_apply(
    checkpoints: Checkpoints, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=eyes,service.instance.id=left")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    collector.metrics.resources.clear()
    collector.spans.clear()
    flags = ("--dtype", "float32", "--otlp-endpoint", collector.endpoint)
    with serving(checkpoints("qwen2_vl"), *flags) as server, Client(server.target) as client:
        client.encode([item()])
        assert server.stop() == 0
    named = {(each["service.name"], each["service.instance.id"]) for each in collector.metrics.resources}
    assert (named, collector.spans) == ({("eyes", "left")}, [])
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    collector.metrics.exports.clear()
    with serving(checkpoints("qwen2_vl"), *flags) as server, Client(server.target) as client:
        client.encode([item()])
        assert server.stop() == 0
    assert not collector.metrics.exports
    assert collector.spans


def failures(server: ServerProcess) -> list[str]:
    """Lines about the collector."""
    return [line for line in server.log().splitlines() if "export" in line or "opentelemetry" in line]


def works_and_ends(server: ServerProcess, *, failed: str) -> None:
    """Requests take no notice of the collector; there is one line about metrics, and the end comes in time."""
    with Client(server.target) as client:
        client.encode([item()])
        server.wait_for("Failed to export metrics")
        began = time.monotonic()
        for _ in range(20):
            client.encode([item()])
        assert time.monotonic() - began < 5
        time.sleep(1.5)
    began = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - began < 15
    about_metrics = [line for line in failures(server) if "metrics" in line]
    assert len(about_metrics) == 1, about_metrics
    assert failed in about_metrics[0]


def test_a_collector_without_metrics_is_named_once(checkpoints: Checkpoints) -> None:
    flags = ("--dtype", "float32", "--lame-duck-seconds", "0", "--otlp-endpoint")
    with (
        collecting(takes_metrics=False) as collector,
        serving(checkpoints("qwen2_vl"), *flags, collector.endpoint) as server,
    ):
        works_and_ends(server, failed="UNIMPLEMENTED")
        assert len(failures(server)) == 1
        assert collector.spans


def test_a_collector_that_is_away_is_named_once(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    flags = ("--dtype", "float32", "--lame-duck-seconds", "0", "--otlp-endpoint", "127.0.0.1:9")
    with serving(checkpoints("qwen2_vl"), *flags) as server:
        works_and_ends(server, failed="UNAVAILABLE")


def test_a_collector_that_never_answers_costs_nothing(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    flags = ("--dtype", "float32", "--lame-duck-seconds", "0", "--otlp-endpoint")
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        with serving(checkpoints("qwen2_vl"), *flags, endpoint) as server:
            works_and_ends(server, failed="")


def test_the_end_does_not_wait_for_a_collector_that_hangs(checkpoints: Checkpoints) -> None:
    """With the SDK's timeout of 10 s for each export."""
    flags = ("--dtype", "float32", "--lame-duck-seconds", "0", "--otlp-endpoint")
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        with serving(checkpoints("qwen2_vl"), *flags, endpoint) as server, Client(server.target) as client:
            client.encode([item()])
            began = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - began < 10
