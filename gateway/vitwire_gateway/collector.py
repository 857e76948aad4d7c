"""What the gateway sends to an OpenTelemetry collector."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from prometheus_client import CollectorRegistry

from vitwire import __version__
from vitwire_gateway.spans import Spans


@contextmanager
def collecting(endpoint: str | None, service: str, registry: CollectorRegistry) -> Iterator[Spans | None]:
    """Send metrics, and the spans that are opened in the block; None if no spans are to be sent."""
    if endpoint is None:
        yield None
        return
    from vitwire.shared.telemetry import MetricsSender, sends  # noqa: PLC0415  # slow, and an extra
    from vitwire_gateway.span_exporter import SpanExporter  # noqa: PLC0415

    with ExitStack() as stack:
        if sends("metrics"):
            stack.callback(MetricsSender(endpoint, service, __version__, registry).close)
        spans = None
        if sends("traces"):
            spans = SpanExporter(endpoint, service)
            stack.callback(spans.close)
        yield spans
