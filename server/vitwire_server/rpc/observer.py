"""A request id in every RPC's trailers, a span, and a log line if it failed."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TypeVar

import grpc

from vitwire_server.observe.tracing import REQUEST_ID, Span, Tracer, request_id
from vitwire_server.rpc.boundary import cancellation
from vitwire_server.rpc.grpc_types import Behaviour, Context, Continuation, RpcHandler, replaced

_log = logging.getLogger(__name__)
_ID_HEADER = "x-request-id"
_EXPECTED = frozenset({grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED})
_LOGGED_ELSEWHERE = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN})
M = TypeVar("M")
R = TypeVar("R")


class RpcObserver(grpc.aio.ServerInterceptor):
    """Observes the RPCs of one service, not health checks and reflection."""

    def __init__(self, service: str, tracer: Tracer | None) -> None:
        self._service = service
        self._tracer = tracer

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
        return replaced(handler, lambda behaviour: self._observed(behaviour, method, headers))

    def _observed(self, behaviour: Behaviour[M, R], method: str, headers: Mapping[str, str]) -> Behaviour[M, R]:
        async def observed(request: M, context: Context) -> R:
            context.set_trailing_metadata(((_ID_HEADER, REQUEST_ID.get()),))
            opened = self._tracer.rpc(self._service, method, headers) if self._tracer else nullcontext()
            with opened as span:
                code = grpc.StatusCode.OK
                try:
                    return await behaviour(request, context)
                except asyncio.CancelledError:
                    code = cancellation(context)
                    raise
                except BaseException:
                    code = context.code() or grpc.StatusCode.UNKNOWN
                    raise
                finally:
                    _log_failure(method, context, code, span)

        return observed


def _log_failure(method: str, context: Context, code: grpc.StatusCode, span: Span | None) -> None:
    if span:
        span.end(code.name)
    if code is grpc.StatusCode.OK or code in _LOGGED_ELSEWHERE:
        return
    level = logging.DEBUG if code in _EXPECTED else logging.WARNING
    reason = " ".join(str(context.details() or "").split())
    _log.log(level, "%s from %s: %s: %s", method, context.peer(), code.name, reason, extra={"kind": code.name})
