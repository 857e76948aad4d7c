"""Spans of the gateway, sent to an OpenTelemetry collector."""

from collections.abc import Iterator
from contextlib import contextmanager

from vitwire_gateway.spans import Spans


@contextmanager
def collecting(endpoint: str | None, service: str) -> Iterator[Spans | None]:
    """Send the spans that are opened in the block; None if none are to be sent."""
    if endpoint is None:
        yield None
        return
    from vitwire.shared.telemetry import in_time, sends_traces  # noqa: PLC0415  # slow, and an extra
    from vitwire_gateway.span_exporter import SpanExporter  # noqa: PLC0415

    if not sends_traces():
        yield None
        return
    spans = SpanExporter(endpoint, service)
    try:
        yield spans.request
    finally:
        in_time(spans.shutdown)
