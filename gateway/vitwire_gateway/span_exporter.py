"""Spans of requests, sent to an OpenTelemetry collector. Needs the extra `otlp`."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context, trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from vitwire import __version__
from vitwire.shared.telemetry import SpanClock, tracer_provider
from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.spans import SPAN, Attributes, Ending, Note

_W3C = TraceContextTextMapPropagator()


class _RequestSpan:
    """The span is also OpenTelemetry's current one, which Vitwire's client passes on to the encoder."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span, clock: SpanClock) -> None:
        self._tracer = tracer
        self._span = span
        self._clock = clock
        self._token = context.attach(trace.set_span_in_context(span))
        self._outer = SPAN.set(self)

    @contextmanager
    def stage(self, name: str, attributes: Attributes, *, is_call: bool) -> Iterator[Note]:
        kind = trace.SpanKind.CLIENT if is_call else trace.SpanKind.INTERNAL
        span = self._tracer.start_span(name, kind=kind, attributes=attributes, start_time=self._clock.now())
        # Messages of errors are not recorded: they may quote the request.
        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            try:
                yield span.set_attributes
            except BaseException as error:
                _fail(span, _kind_of(error), is_fault=not isinstance(error, asyncio.CancelledError))
                raise
            finally:
                span.end(self._clock.now())

    def headers(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        _W3C.inject(carrier)
        return carrier

    def end(self, ending: Ending) -> None:
        self._span.update_name(ending.name)
        self._span.set_attributes(ending.attributes)
        if ending.error:
            _fail(self._span, ending.error, is_fault=ending.is_fault)
        self._span.end(self._clock.now())
        SPAN.reset(self._outer)
        context.detach(self._token)


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


class SpanExporter:
    """Opens spans and sends them in the background."""

    def __init__(self, endpoint: str, service: str) -> None:
        self._provider = tracer_provider(endpoint, service, __version__)
        self._tracer = self._provider.get_tracer("vitwire_gateway", __version__)

    def begin(self, name: str, headers: Mapping[str, str], attributes: Attributes) -> _RequestSpan:
        parent, clock = _W3C.extract(headers), SpanClock()
        span = self._tracer.start_span(name, parent, trace.SpanKind.SERVER, attributes, start_time=clock.now())
        return _RequestSpan(self._tracer, span, clock)

    def shutdown(self) -> None:
        """Send remaining spans."""
        self._provider.shutdown()
