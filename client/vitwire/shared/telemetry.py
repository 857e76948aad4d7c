"""Spans sent to an OpenTelemetry collector over OTLP. Needs the extra `otlp`.

They are sent by a thread in the background. The SDK's `OTEL_` variables apply.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from threading import Thread
from uuid import uuid4

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

_CLOSE_SECONDS = 3.0


class _Failures(logging.Filter):
    """Lets each failure to export be logged once, until an export succeeds."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Called for each line of the SDK's exporters."""
        if not (record.msg.startswith("Failed to export") and isinstance(record.args, tuple)):
            return True
        code = str(record.args[2])
        is_new = code not in self._seen
        self._seen.add(code)
        return is_new

    def succeeded(self) -> None:
        """The collector took spans."""
        self._seen.clear()


_FAILURES = _Failures()


class _SpanExporter(OTLPSpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if result is SpanExportResult.SUCCESS:
            _FAILURES.succeeded()
        return result


def sends_traces() -> bool:
    """True unless `OTEL_TRACES_EXPORTER` or `OTEL_SDK_DISABLED` says otherwise."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    return os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() != "none"


def tracer_provider(endpoint: str, service: str, version: str) -> TracerProvider:
    """Makes tracers whose spans go to the collector at host:port, or https://host:port for TLS.

    The collector need not be reachable yet. `service` is the name of this process without OTEL_SERVICE_NAME.
    """
    provider = TracerProvider(resource=_resource(service, version), shutdown_on_exit=False)
    exporter = _SpanExporter(endpoint, insecure=not endpoint.startswith("https://"))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _log_less()
    return provider


class SpanClock:
    """Times of one request's spans, in nanoseconds since the epoch.

    They stay in order if the system's clock is set meanwhile.
    """

    def __init__(self) -> None:
        self._epoch = time.time_ns() - time.monotonic_ns()

    def now(self) -> int:
        return self._epoch + time.monotonic_ns()

    def at(self, seconds: float) -> int:
        """The time at some seconds of the monotonic clock."""
        return self._epoch + round(seconds * 1e9)


def in_time(shutdown: Callable[[], object]) -> None:
    """Shut down an exporter. A process that ends waits no longer than 3 s for it."""
    closing = Thread(target=shutdown, name="otlp-close", daemon=True)
    closing.start()
    closing.join(_CLOSE_SECONDS)


def _resource(service: str, version: str) -> Resource:
    """This process, with a unique id, so that spans of several do not mix. Variables of the SDK take precedence."""
    ours = {"service.name": service, "service.version": version, "service.instance.id": str(uuid4())}
    return Resource.create(ours).merge(OTELResourceDetector().detect())


def _log_less() -> None:
    """A collector that is away is no news after the first time: neither are retries, nor spans that are dropped."""
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").addFilter(_FAILURES)
