"""Spans and metrics of the gateway, sent to an OpenTelemetry collector."""

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry

from vitwire import __version__
from vitwire_gateway.spans import Spans


@contextmanager
def collecting(endpoint: str | None, service: str, registry: CollectorRegistry) -> Iterator[Spans | None]:
    """Send metrics, and the spans that are opened in the block; None if no spans are to be sent."""
    if endpoint is None:
        yield None
        return
    from vitwire.shared.telemetry import MetricsSender, in_time, sends  # noqa: PLC0415  # slow, and an extra
    from vitwire_gateway.span_exporter import SpanExporter  # noqa: PLC0415

    spans = SpanExporter(endpoint, service) if sends("traces") else None
    metrics = MetricsSender(endpoint, service, __version__, registry) if sends("metrics") else None
    try:
        yield spans
    finally:
        in_time(*(each.shutdown for each in (spans, metrics) if each))
