"""Spans of a request while the system's clock is set back."""

import time

import opentelemetry.sdk.trace
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from vitwire_server.observe import otlp

ENDPOINT = "127.0.0.1:1"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What would be sent to a collector."""
    kept, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    monkeypatch.setattr(otlp, "tracer_provider", lambda _: provider)
    return kept


def set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (time, opentelemetry.sdk.trace):
        monkeypatch.setattr(module, "time_ns", lambda: 10**9)


def check(spans: InMemorySpanExporter) -> None:
    inner, outer = spans.get_finished_spans()
    times = [each or 0 for each in (outer.start_time, inner.start_time, inner.end_time, outer.end_time)]
    assert times == sorted(times)


def test_of_a_server(spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    with otlp.OtlpTracer(ENDPOINT).rpc("service", "method", {}) as span:
        set_back(monkeypatch)
        assert span
        began = time.monotonic()
        span.stage("execute", began, time.monotonic() - began, {})
    check(spans)
