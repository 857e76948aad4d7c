"""What is told about an RPC while it runs: its stages to a trace, its id to logs and exemplars.

Without an endpoint nothing is traced, and OpenTelemetry is not even imported.
"""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Protocol

from vitwire_server.core.reports import Encoded, ItemReport, Outcome
from vitwire_server.observe.request_ids import REQUEST_ID

Attributes = Mapping[str, str | int | float | bool]


class Span(Protocol):
    """An RPC in a trace that is recorded."""

    trace_id: str
    """32 hex digits."""

    def stage(self, name: str, start: float, seconds: float, attributes: Attributes) -> None:
        """A child that began at `start` on the monotonic clock."""
        ...

    def end(self, code: str) -> None:
        """The RPC ended with a status code of gRPC."""
        ...


class Tracer(Protocol):
    """Opens the span of an RPC, and makes it `SPAN` for the time of the block."""

    def rpc(self, service: str, method: str, headers: Mapping[str, str]) -> AbstractContextManager[Span | None]:
        """None where the trace that `headers` (W3C) belong to is not sampled."""
        ...


SPAN: ContextVar[Span | None] = ContextVar("span", default=None)
"""Of the RPC that the current task serves; None outside of one and where it is not recorded."""


def trace_item(index: int, outcome: Outcome, sending: float) -> None:
    """Item `index` was sent just now, in `sending` seconds: add its stages to the current span."""
    span = SPAN.get()
    if span is None:
        return
    now = time.monotonic()
    attributes: dict[str, str | int] = {"vitwire.item": index}
    if isinstance(outcome, Encoded):
        report = outcome.report
        attributes |= {"vitwire.path": str(report.path), "vitwire.tokens": report.tokens}
        if report.budget_tokens:
            attributes["vitwire.budget_tokens"] = report.budget_tokens
        _trace_batch(span, report, attributes)
    span.stage("send", now - sending, sending, attributes)


def _trace_batch(span: Span, report: ItemReport, attributes: Attributes) -> None:
    """The stages up to the rows; on CUDA they overlap with those of other batches, and execution with copying."""
    if report.timings is None:
        return
    start, timings = report.started, report.timings
    span.stage("queue", start - report.queued, report.queued, attributes)
    span.stage("stage_in", start, timings.stage_in, attributes)
    span.stage("execute", start + timings.stage_in, timings.execute, attributes)
    span.stage("stage_out", start + report.encoded - timings.stage_out, timings.stage_out, attributes)


def exemplar() -> dict[str, str]:
    """What leads from a histogram's bucket to the request: its trace, or its id in the log."""
    if span := SPAN.get():
        return {"trace_id": span.trace_id}
    return {"request_id": name} if (name := REQUEST_ID.get()) else {}
