"""The span of the current request, in which every part of the gateway records its stages.

Without `--otlp-endpoint` there is none, and OpenTelemetry is not imported.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple

Attributes = Mapping[str, str | int | float | bool]
Note = Callable[[Attributes], None]
"""Adds attributes to a span."""

_MAX_TEXT = 256
_NONE: Attributes = {}


class Span(NamedTuple):
    """The span of a request."""

    stage: Callable[[str, Attributes, bool], AbstractContextManager[Note]]
    """As `stage`, within the task's current span. An error in it is recorded by its kind."""
    headers: Callable[[], dict[str, str]]
    """W3C headers that make the task's current span a parent in another service."""


SPAN: ContextVar[Span | None] = ContextVar("span", default=None)
"""The span of the current task's request."""


@dataclass(slots=True)
class Ending:
    """How a request ended, for its span."""

    name: str
    """Replaces the first one."""
    attributes: dict[str, str | int | float | bool] = field(default_factory=dict)
    error: str = ""
    """The kind of error, empty for none."""
    is_fault: bool = False
    """The error is not the caller's."""


Spans = Callable[[str, Mapping[str, str], Attributes], AbstractContextManager[Ending]]
"""Opens the span of this task's request, by name, in the trace of the headers (W3C), for the time of the block."""


def request_span(
    spans: Spans | None, name: str, headers: Mapping[str, str], attributes: Attributes
) -> AbstractContextManager[Ending]:
    """The span of this task's request, if there are spans, for the time of the block, which describes its end."""
    return spans(name, headers, attributes) if spans else nullcontext(Ending(name))


@contextmanager
def stage(name: str, attributes: Attributes = _NONE, *, is_call: bool = False) -> Iterator[Note]:
    """A stage of the current request. `is_call`: a request to another service."""
    span = SPAN.get()
    if span is None:
        yield lambda _: None
        return
    with span.stage(name, attributes, is_call) as note:
        yield note


def trace_headers() -> dict[str, str]:
    """W3C headers with the current span as parent; empty if the gateway does not trace."""
    span = SPAN.get()
    return span.headers() if span else {}


def short(text: str) -> str:
    """A caller's text as an attribute: at most 256 characters, all valid in UTF-8."""
    return text[:_MAX_TEXT].encode(errors="replace").decode()
