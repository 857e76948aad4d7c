"""Calls of one request that the calling thread reads itself.

By default gRPC reads all calls of a channel in a thread, which it starts with the first call and ends after the last:
with one call at a time each call starts a thread and waits for it twice. Reading in the calling thread took a quarter
of the time off a call with 1.6 MB of rows, and a third of its processor time (gRPC 1.85). But gRPC keeps 21 KB of a
cancelled call until its channel is closed, unless its events are read to their end: `drain` does that.
"""

from typing import Any

import grpc
from grpc import _channel

from vitwire.errors import VitwireError

_SingleThreaded: Any = getattr(_channel, "_SingleThreadedRendezvous", None)
OPTIONS: tuple[tuple[str, int | str], ...] = (
    (("SingleThreadedUnaryStream", 1),) if hasattr(_SingleThreaded, "_consume_next_event") else ()
)
"""Options of the channel; none for a release of gRPC that lacks what `drain` needs."""

ENDS = (grpc.RpcError, VitwireError, GeneratorExit)
"""Exceptions that end a call. Any other, such as KeyboardInterrupt, may come from a signal's handler."""


def has_headers(call: object) -> bool:
    """Whether the headers of a call have arrived. gRPC's method waits for them, and no other thread can then cancel."""
    state = getattr(call, "_state", None)
    return state is None or state.initial_metadata is not None


def drain(call: object) -> None:
    """Read what is left of a call that has ended or was cancelled, in the thread that read it before.

    Not after an exception of a signal's handler: gRPC may have lost an event, and would wait for it without end.
    """
    if type(call) is _SingleThreaded:
        known: Any = call
        while known._state.due:  # noqa: SLF001 - gRPC has no public way
            known._consume_next_event()  # noqa: SLF001
