"""Spans of requests, sent to an OpenTelemetry collector. Needs the extra `otlp`."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from vitwire import __version__
from vitwire.shared.telemetry import SpanClock, tracer_provider
from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.spans import SPAN, Attributes, Ending, Note, Span

_W3C = TraceContextTextMapPropagator()


class SpanExporter:
    """Opens spans and sends them in the background."""

    def __init__(self, endpoint: str, service: str) -> None:
        self._provider = tracer_provider(endpoint, service, __version__)
        self._tracer = self._provider.get_tracer("vitwire_gateway", __version__)

    @contextmanager
    def request(self, name: str, headers: Mapping[str, str], attributes: Attributes) -> Iterator[Ending]:
        """As `Spans`. The span is also OpenTelemetry's current one, which Vitwire's client passes on to the encoder."""
        clock, ending = SpanClock(), Ending(name)

        @contextmanager
        def stage(name: str, attributes: Attributes, is_call: bool) -> Iterator[Note]:
            kind = trace.SpanKind.CLIENT if is_call else trace.SpanKind.INTERNAL
            span = self._tracer.start_span(name, kind=kind, attributes=attributes, start_time=clock.now())
            # Messages of errors are not recorded: they may quote the request.
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                try:
                    yield span.set_attributes
                except BaseException as error:
                    _fail(span, _kind_of(error), is_fault=not isinstance(error, asyncio.CancelledError))
                    raise
                finally:
                    span.end(clock.now())

        parent, kind = _W3C.extract(headers), trace.SpanKind.SERVER
        span = self._tracer.start_span(name, parent, kind, attributes, start_time=clock.now())
        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            outer = SPAN.set(Span(stage, _headers))
            try:
                yield ending
            finally:
                SPAN.reset(outer)
                span.update_name(ending.name)
                span.set_attributes(ending.attributes)
                if ending.error:
                    _fail(span, ending.error, is_fault=ending.is_fault)
                span.end(clock.now())

    def shutdown(self) -> None:
        """Send remaining spans."""
        self._provider.shutdown()


def _headers() -> dict[str, str]:
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    return carrier


def _fail(span: trace.Span, kind: str, *, is_fault: bool) -> None:
    span.set_attribute("error.type", kind)
    if is_fault:
        span.set_status(trace.StatusCode.ERROR)


def _kind_of(error: BaseException) -> str:
    match error:
        case ApiError():
            return error.code
        case asyncio.CancelledError():
            return "cancelled"
        case _:
            return type(error).__name__
