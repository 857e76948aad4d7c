"""The server's traces, sent to an OpenTelemetry collector over OTLP by a thread in the background.

The SDK's `OTEL_` variables apply.
"""

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Thread
from uuid import uuid4

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from vitwire_server.observe.tracing import REQUEST_ID, SPAN, Attributes, Span
from vitwire_server.release import release

_CLOSE_SECONDS = 3.0
_SERVER_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Statuses that count as errors of a server span in OpenTelemetry's conventions for gRPC."""


class OtlpTracer:
    """Sends spans to a collector in the background; the SDK reads its `OTEL_` variables (sampler, headers, …)."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is host:port, or https://host:port for TLS; it need not be reachable yet."""
        self._provider = tracer_provider(endpoint)
        self._tracer = self._provider.get_tracer("vitwire_server", release())
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def rpc(self, service: str, method: str, headers: Mapping[str, str]) -> Iterator[Span | None]:
        """The span of an RPC in the trace of `headers` (W3C); None if it is not sampled."""
        attributes = {"rpc.system.name": "grpc", "rpc.method": f"{service}/{method}"}
        if name := REQUEST_ID.get():
            attributes["vitwire.request_id"] = name
        parent, clock = self._propagator.extract(headers), _Clock()
        kind = trace.SpanKind.SERVER
        span = self._tracer.start_span(f"{service}/{method}", parent, kind, attributes, start_time=clock.now())
        recorded = self._recorded(span, clock) if span.is_recording() else None
        token = SPAN.set(recorded)
        try:
            yield recorded
        finally:
            SPAN.reset(token)
            span.end(clock.now())

    def _recorded(self, span: trace.Span, clock: "_Clock") -> Span:
        parent = trace.set_span_in_context(span)

        def stage(name: str, start: float, seconds: float, attributes: Attributes) -> None:
            began = clock.at(start)
            child = self._tracer.start_span(name, parent, attributes=attributes, start_time=began)
            child.end(began + round(max(0.0, seconds) * 1e9))

        def end(code: str) -> None:
            span.set_attribute("rpc.response.status_code", code)
            if code in _SERVER_FAULTS:
                span.set_status(trace.Status(trace.StatusCode.ERROR, code))

        return Span(trace.format_trace_id(span.get_span_context().trace_id), stage, end)

    def close(self) -> None:
        """Send remaining spans, for 3 s at most."""
        closing = Thread(target=self._provider.shutdown, name="otlp-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


def tracer(endpoint: str) -> OtlpTracer | None:
    """None if `OTEL_TRACES_EXPORTER` or `OTEL_SDK_DISABLED` turns traces off."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    is_off = os.environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none"
    return None if is_off else OtlpTracer(endpoint)


def tracer_provider(endpoint: str) -> TracerProvider:
    """Makes tracers whose spans go to the collector. The resource is this process, with a unique id.

    Variables of the SDK, such as OTEL_SERVICE_NAME, take precedence.
    """
    ours = {"service.name": "vitwire-server", "service.version": release(), "service.instance.id": str(uuid4())}
    resource = Resource.create(ours).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    exporter = _SpanExporter(endpoint, insecure=not endpoint.startswith("https://"))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    # A collector that is away is no news after the first time: neither are retries, nor spans that are dropped.
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").addFilter(_FAILURES)
    return provider


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


class _Clock:
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
