"""The boundary of every RPC: it is counted, logged and traced, and errors become statuses."""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import TypeVar

import grpc

from vitwire_server.core.errors import EncoderError, Overloaded
from vitwire_server.observe.metrics.rpc import RpcMetrics
from vitwire_server.observe.tracing import REQUEST_ID, Span, Tracer, request_id
from vitwire_server.rpc.credentials import IS_REFUSED
from vitwire_server.rpc.grpc_types import Behaviour, Context, Continuation, RpcHandler, cancelled_if_gone, replaced
from vitwire_server.rpc.status import code_of, message_of, trailers_of

_log = logging.getLogger(__name__)
M = TypeVar("M")
R = TypeVar("R")
Ending = tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]
"""A status other than OK: code, message and trailers."""
_ARRIVAL_SECONDS = 0.1
"""Longest time that a request is taken to need from its client to its handler."""
_ID_HEADER = "x-request-id"
_EXPECTED = frozenset({grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED})
_LOGGED_ELSEWHERE = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN})


class RpcBoundary(grpc.aio.ServerInterceptor):
    """Around the RPCs of one service, not health checks and reflection; the only place that catches every error.

    Gives them a request id in their trailers and a span, counts them, and logs those that fail. RPCs without a valid
    token are logged only.
    """

    def __init__(self, service: str, metrics: RpcMetrics, stall_seconds: float) -> None:
        """A client that does not read its RPC's status for `stall_seconds` is cut off."""
        self.tracer: Tracer | None = None
        self._service = service
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

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> RpcHandler | None:
        """Called by gRPC for each RPC, in the task that serves it."""
        service, _, method = details.method.removeprefix("/").partition("/")
        if service != self._service:
            return await continuation(details)
        headers = {key: value for key, value in details.invocation_metadata or () if isinstance(value, str)}
        REQUEST_ID.set(request_id(headers.get(_ID_HEADER)))
        handler = await continuation(details)
        if handler is None:  # a method that the service does not have
            return None
        return replaced(handler, lambda behaviour: self.around(behaviour, method, headers))

    def around(self, behaviour: Behaviour[M, R], method: str, headers: Mapping[str, str]) -> Behaviour[M, R]:
        """The behaviour of an RPC, whose errors end it with their statuses.

        If it returns a code, that one is counted; on the wire such an RPC ends with OK.
        """

        async def run(request: M, context: Context) -> R:
            start = time.perf_counter()
            context.set_trailing_metadata(((_ID_HEADER, REQUEST_ID.get()),))
            counts = not IS_REFUSED.get()
            self._metrics.inflight.inc(counts)
            self._active += counts
            code = counted = grpc.StatusCode.OK
            with self.tracer(self._service, method, headers) if self.tracer else nullcontext() as span:
                try:
                    answer, ending = await self._outcome(behaviour, method, request, context)
                    if ending:
                        counted = ending[0]
                        await self._abort(context, ending)
                    elif isinstance(answer, grpc.StatusCode):
                        counted = answer
                except asyncio.CancelledError:
                    code = cancellation(context)
                    counted = code if counted is grpc.StatusCode.OK else counted
                    raise
                except grpc.aio.AbortError:
                    code = counted = context.code() or grpc.StatusCode.UNKNOWN
                    raise
                finally:
                    self._active -= counts
                    self._idle.set()
                    self._metrics.inflight.dec(counts)
                    if counts:
                        self._metrics.requests.labels(method, counted.name).inc()
                        self._metrics.request_seconds.labels(method).observe(time.perf_counter() - start)
                    _log_failure(method, context, code, span)
            assert answer is not None, "an RPC without an answer was aborted"
            return answer

        return run

    async def _outcome(
        self, behaviour: Behaviour[M, R], method: str, request: M, context: Context
    ) -> tuple[R | None, Ending | None]:
        """The answer, or how the RPC ends.

        The caller aborts, outside of every frame that refers to the message: grpc keeps the error that `abort`
        raises in a reference cycle with its frames, which would keep the body alive until it is collected.
        """
        try:
            return await behaviour(request, context), None
        except EncoderError as error:
            if isinstance(error, Overloaded):
                self._metrics.rejected.labels(error.reason).inc()
            return None, (code_of(error), message_of(error), trailers_of(error))
        except grpc.aio.AbortError:  # without a valid token
            raise
        except Exception:  # noqa: BLE001 - the boundary: a bug ends its RPC, not the server
            if context.cancelled():  # the client left while rows were being written
                raise asyncio.CancelledError from None
            _log.exception("%s failed", method)
            return None, (grpc.StatusCode.INTERNAL, "internal error: see the server's log", ())

    async def _abort(self, context: Context, ending: Ending) -> None:
        """End an RPC; a client that does not read its status is cut off. Raises CancelledError if it is gone."""
        code, message, trailers = ending
        try:
            with cancelled_if_gone("its status was sent"):
                async with asyncio.timeout(self._stall_seconds):
                    await context.abort(code, message, (*trailers, *(context.trailing_metadata() or ())))
        except TimeoutError:
            raise asyncio.CancelledError from None


def cancellation(context: Context) -> grpc.StatusCode:
    """Why gRPC cancelled an RPC: its deadline passed, or its client left.

    The client's deadline passes first, by the time that its request took to arrive, and it resets the stream then.
    """
    remaining = context.time_remaining()
    expired = remaining is not None and remaining <= _ARRIVAL_SECONDS
    return grpc.StatusCode.DEADLINE_EXCEEDED if expired else grpc.StatusCode.CANCELLED


def _log_failure(method: str, context: Context, code: grpc.StatusCode, span: Span | None) -> None:
    if span:
        span.end(code.name)
    if code is grpc.StatusCode.OK or code in _LOGGED_ELSEWHERE:
        return
    level = logging.DEBUG if code in _EXPECTED else logging.WARNING
    reason = " ".join(str(context.details() or "").split())
    _log.log(level, "%s from %s: %s: %s", method, context.peer(), code.name, reason, extra={"kind": code.name})
