"""The server's traces, sent to a collector over OTLP."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from vitwire.shared.telemetry import SpanClock, in_time, sends_traces, tracer_provider
from vitwire_server.observe.tracing import REQUEST_ID, SPAN, Attributes, Span
from vitwire_server.release import release

_SERVICE = "vitwire-server"
_SERVER_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Statuses that count as errors of a server span in OpenTelemetry's conventions for gRPC."""


class OtlpTracer:
    """Sends spans to a collector in the background; the SDK reads its `OTEL_` variables (sampler, headers, …)."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint` is host:port, or https://host:port for TLS; it need not be reachable yet."""
        self._provider = tracer_provider(endpoint, _SERVICE, release())
        self._tracer = self._provider.get_tracer("vitwire_server", release())
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def rpc(self, service: str, method: str, headers: Mapping[str, str]) -> Iterator[Span | None]:
        """The span of an RPC in the trace of `headers` (W3C); None if it is not sampled."""
        attributes = {"rpc.system.name": "grpc", "rpc.method": f"{service}/{method}"}
        if name := REQUEST_ID.get():
            attributes["vitwire.request_id"] = name
        parent, clock = self._propagator.extract(headers), SpanClock()
        kind = trace.SpanKind.SERVER
        span = self._tracer.start_span(f"{service}/{method}", parent, kind, attributes, start_time=clock.now())
        recorded = self._recorded(span, clock) if span.is_recording() else None
        token = SPAN.set(recorded)
        try:
            yield recorded
        finally:
            SPAN.reset(token)
            span.end(clock.now())

    def _recorded(self, span: trace.Span, clock: SpanClock) -> Span:
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
        """Send remaining spans, for a few seconds at most."""
        in_time(self._provider.shutdown)


def tracer(endpoint: str) -> OtlpTracer | None:
    """None if the SDK's variables turn traces off."""
    return OtlpTracer(endpoint) if sends_traces() else None
