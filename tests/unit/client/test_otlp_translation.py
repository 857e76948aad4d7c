"""Families of prometheus_client in OpenTelemetry's form."""

import logging

import pytest
from opentelemetry.sdk.metrics.export import Gauge, Histogram, Metric, Sum
from prometheus_client import CollectorRegistry, Counter, Enum, Info, Summary
from prometheus_client import Gauge as PrometheusGauge
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from vitwire.shared.otlp_metrics import Translator
from vitwire.shared.telemetry import _Failures, _interval, sends


def by_name(metrics: list[Metric]) -> dict[str, Metric]:
    found = {each.name: each for each in metrics}
    assert len(found) == len(metrics)
    return found


def test_every_kind_of_metric_keeps_the_name_of_its_page() -> None:
    registry = CollectorRegistry()
    Counter("sent_bytes", "of answers", ["way"], registry=registry).labels("nixl").inc(3)
    PrometheusGauge("waiting_seconds", "in the queue", registry=registry).set(-1.5)
    Info("build", "what runs", registry=registry).info({"version": "1"})
    Enum("state", "of it", states=["up", "down"], registry=registry)
    Summary("size", "of items", registry=registry).observe(4)
    Counter("never", "without a series", ["label"], registry=registry)
    found = by_name(Translator().metrics(registry.collect()))
    assert found.keys() == {"sent_bytes_total", "waiting_seconds", "build_info", "state", "size_count", "size_sum"}
    sent = found["sent_bytes_total"]
    assert isinstance(sent.data, Sum)
    assert (sent.unit, sent.description, sent.data.is_monotonic) == ("By", "of answers", True)
    (point,) = sent.data.data_points
    assert (point.value, point.attributes) == (3, {"way": "nixl"})
    assert isinstance(found["waiting_seconds"].data, Gauge)
    assert (found["waiting_seconds"].unit, found["waiting_seconds"].data.data_points[0].value) == ("s", -1.5)
    (build,) = found["build_info"].data.data_points
    assert (build.value, build.attributes) == (1, {"version": "1"})
    assert {each.attributes["state"]: each.value for each in found["state"].data.data_points} == {"up": 1, "down": 0}


def test_buckets_count_what_is_in_them_alone() -> None:
    registry = CollectorRegistry()
    histogram = PrometheusHistogram("took_seconds", "of it", ["stage"], buckets=(0.1, 1, 10), registry=registry)
    for seconds in (0.05, 0.1, 0.5, 5, 100):
        histogram.labels("queue").observe(seconds)
    histogram.labels("send")
    (metric,) = Translator().metrics(registry.collect())
    assert isinstance(metric.data, Histogram)
    queue, send = metric.data.data_points
    assert (queue.attributes, queue.explicit_bounds, queue.bucket_counts) == (
        {"stage": "queue"},
        [0.1, 1, 10],
        [2, 1, 1, 1],
    )
    assert (queue.count, queue.sum) == (5, pytest.approx(105.65))
    assert (send.count, send.sum, send.bucket_counts) == (0, 0, [0, 0, 0, 0])


def test_a_counter_of_a_process_that_was_restarted_starts_anew() -> None:
    class Restarts(Collector):
        count = 5.0

        def collect(self) -> list[CounterMetricFamily]:
            return [CounterMetricFamily("cpu_seconds", "of a process", value=self.count)]

    registry, translator, process = CollectorRegistry(), Translator(), Restarts()
    registry.register(process)

    def read() -> tuple[int, float]:
        (metric,) = translator.metrics(registry.collect())
        (point,) = metric.data.data_points
        return point.start_time_unix_nano, point.value

    first, again = read(), read()
    assert first == again
    process.count = 2
    start, value = read()
    assert (start > first[0], value) == (True, 2)
    process.count = 3
    assert read() == (start, 3)


def failed(signal: str, code: str) -> logging.LogRecord:
    message = "Failed to export %s to %s, error code: %s, error details: %s"
    return logging.LogRecord("sdk", logging.ERROR, "", 0, message, (signal, "host:1", code, "why"), None)


def test_a_failure_is_logged_until_it_is_over_and_comes_again() -> None:
    failures = _Failures()
    assert [failures.filter(failed("metrics", "UNAVAILABLE")) for _ in range(3)] == [True, False, False]
    assert failures.filter(failed("metrics", "UNIMPLEMENTED"))
    assert failures.filter(failed("traces", "UNAVAILABLE"))
    failures.succeeded("metrics")
    assert failures.filter(failed("metrics", "UNAVAILABLE"))
    assert not failures.filter(failed("traces", "UNAVAILABLE"))
    assert failures.filter(logging.LogRecord("sdk", logging.ERROR, "", 0, "another", None, None))


@pytest.mark.parametrize(("text", "seconds"), [("", 60), ("500", 0.5), ("nan", 60), ("-1", 60), ("soon", 60)])
def test_the_interval_is_the_variable_of_the_sdk(text: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", text)
    assert _interval() == seconds


def test_signals_are_turned_off_by_variables_of_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sends("traces")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "None")
    assert (sends("traces"), sends("metrics")) == (True, False)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not sends("traces")
