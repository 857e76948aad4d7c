"""The boundary of every RPC: RPCs are counted, and errors become statuses."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import grpc

from vitwire_server.core.errors import EncoderError, Overloaded
from vitwire_server.observe.metrics.rpc import RpcMetrics
from vitwire_server.observe.tracing import exemplar
from vitwire_server.rpc.grpc_types import Context
from vitwire_server.rpc.status import code_of, message_of, trailers_of

_log = logging.getLogger(__name__)
T = TypeVar("T")
Ending = tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]
"""A status other than OK: code, message and trailers."""
_ARRIVAL_SECONDS = 0.1
"""Longest time that a request is taken to need from its client to its handler."""


class RpcBoundary:
    """Runs RPCs, counts those that are active, and is the only place that catches every error."""

    def __init__(self, metrics: RpcMetrics, stall_seconds: float) -> None:
        """A client that does not read its RPC's status for `stall_seconds` is cut off."""
        self._metrics = metrics
        self._stall_seconds = stall_seconds
        self._active = 0
        self._idle = asyncio.Event()

    async def idle(self, seconds: float) -> None:
        """Wait at most `seconds` until no RPC is active."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._active:
                    self._idle.clear()
                    await self._idle.wait()

    async def run(
        self,
        method: str,
        context: Context,
        serving: Coroutine[Any, Any, T],
        counts_as: Callable[[T], grpc.StatusCode] = lambda _: grpc.StatusCode.OK,
    ) -> T:
        """Returns what `serving` returns; an error of it ends the RPC with its status.

        `counts_as` maps the answer to the code that is counted; on the wire such an RPC ends with OK.
        """
        start = time.perf_counter()
        self._metrics.inflight.inc()
        self._active += 1
        code = grpc.StatusCode.OK
        try:
            answer, ending = await self._outcome(method, context, serving)
            if ending:
                code = ending[0]
                await self._abort(context, ending)
            elif answer is not None:
                code = counts_as(answer)
        except asyncio.CancelledError:
            code = code if code is not grpc.StatusCode.OK else cancellation(context)
            raise
        finally:
            self._active -= 1
            self._idle.set()
            self._metrics.inflight.dec()
            self._metrics.requests.labels(method, code.name).inc()
            self._metrics.request_seconds.labels(method).observe(time.perf_counter() - start, exemplar())
        assert answer is not None, "an RPC without an answer was aborted"
        return answer

    async def _outcome(
        self, method: str, context: Context, serving: Coroutine[Any, Any, T]
    ) -> tuple[T | None, Ending | None]:
        """The answer, or how the RPC ends.

        The caller aborts, outside of every frame that refers to the request: grpc keeps the error that `abort`
        raises in a reference cycle with its frames, which would keep the body alive until it is collected.
        """
        try:
            return await serving, None
        except EncoderError as error:
            if isinstance(error, Overloaded):
                self._metrics.rejected.labels(error.reason).inc()
            return None, (code_of(error), message_of(error), trailers_of(error))
        except Exception:  # noqa: BLE001 - the boundary: a bug ends its RPC, not the server
            if context.cancelled():  # the client left while rows were being written
                raise asyncio.CancelledError from None
            _log.exception("%s failed", method)
            return None, (grpc.StatusCode.INTERNAL, "internal error: see the server's log", ())

    async def _abort(self, context: Context, ending: Ending) -> None:
        """End an RPC; a client that does not read its status is cut off. Raises CancelledError if it is gone."""
        code, message, trailers = ending
        try:
            async with asyncio.timeout(self._stall_seconds):
                await context.abort(code, message, (*trailers, *(context.trailing_metadata() or ())))
        except grpc.aio.AbortError:  # which ends the RPC
            raise
        except TimeoutError:
            raise asyncio.CancelledError from None
        except Exception as error:  # noqa: BLE001 - gRPC raises errors of its private core when a stream is gone
            _log.debug("a client left before its status was sent: %r", error)
            raise asyncio.CancelledError from None


def cancellation(context: Context) -> grpc.StatusCode:
    """Why gRPC cancelled an RPC: its deadline passed, or its client left.

    The client's deadline passes first, by the time that its request took to arrive, and it resets the stream then.
    """
    remaining = context.time_remaining()
    expired = remaining is not None and remaining <= _ARRIVAL_SECONDS
    return grpc.StatusCode.DEADLINE_EXCEEDED if expired else grpc.StatusCode.CANCELLED
