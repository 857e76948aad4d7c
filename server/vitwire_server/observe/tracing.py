"""Request ids and traces of RPCs: the current span, and the stages recorded in it.

Without an endpoint nothing is traced and OpenTelemetry is not imported.
"""

import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from uuid import uuid4

from vitwire_server.core.delivery import Delivered
from vitwire_server.core.models import Place
from vitwire_server.core.reports import Encoded, Outcome

REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the current task's RPC; empty outside of RPCs."""
_VALID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,63}")
Attributes = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class Span:
    """The recorded span of an RPC."""

    trace_id: str
    """32 hex digits."""
    stage: Callable[[str, float, float, Attributes], None]
    """Records a child span: its name, its start on the monotonic clock, its seconds and attributes."""
    end: Callable[[str], None]
    """Records the gRPC status code that the RPC ended with."""


Tracer = Callable[[str, str, Mapping[str, str]], AbstractContextManager[Span | None]]
"""Opens the span of an RPC, by service, method and headers, and sets `SPAN` to it within the block.

None if the trace of the headers (W3C) is not sampled.
"""

SPAN: ContextVar[Span | None] = ContextVar("span", default=None)
"""Span of the current task's RPC; None outside of RPCs and if it is not recorded."""


def trace_item(index: int, outcome: Outcome, sending: float) -> None:
    """Add the stages of item `index`, sent just now in `sending` seconds, to the current span."""
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
        if report.timings:  # stages on CUDA overlap with stages of other batches
            start, timings = report.started, report.timings
            span.stage("queue", start - report.queued, report.queued, attributes)
            span.stage("stage_in", start, timings.stage_in, attributes)
            span.stage("execute", start + timings.stage_in, timings.execute, attributes)
            if timings.prepare:
                on_device = attributes | {"vitwire.where": str(Place.DEVICE)}
                span.stage("prepare", start + timings.stage_in, timings.prepare, on_device)
            span.stage("stage_out", start + report.encoded - timings.stage_out, timings.stage_out, attributes)
        if isinstance(outcome.delivery, Delivered):
            seconds = outcome.delivery.seconds
            span.stage("deliver", now - sending - seconds, seconds, attributes)
    span.stage("send", now - sending, sending, attributes)


def trace_preparing(start: float, stages: Mapping[str, float], attributes: Attributes) -> None:
    """Add the seconds of a file or picture to the current span: the first stage from `start`, the others up to now."""
    span = SPAN.get()
    if span is None:
        return
    (first, waited), *others = stages.items()
    span.stage(first, start, waited, attributes)
    at = time.monotonic() - sum(seconds for _, seconds in others)
    for name, seconds in others:
        if seconds:
            span.stage(name, at, seconds, attributes)
        at += seconds


def request_id(offered: str | bytes | None) -> str:
    """The caller's id if it is safe to log, else a new one."""
    return offered if isinstance(offered, str) and _VALID.fullmatch(offered) else uuid4().hex
