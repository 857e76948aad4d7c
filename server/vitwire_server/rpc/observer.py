"""What an RPC leaves behind: a request id in its trailers, a span, and a line in the log where it failed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from typing import Any

import grpc

from vitwire_server.observe.request_ids import REQUEST_ID, request_id
from vitwire_server.observe.tracing import Span, Tracer
from vitwire_server.rpc.boundary import cancellation
from vitwire_server.rpc.principals import Context, Continuation, RpcHandler

_log = logging.getLogger(__name__)
_ID_HEADER = "x-request-id"
_BEHAVIOURS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
_CALLERS_BUSINESS = frozenset({grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED})
_LOGGED_WITH_CAUSE = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN})
Behaviour = Callable[[Any, Context], Awaitable[Any]]


class RpcObserver(grpc.aio.ServerInterceptor):
    """Follows the RPCs of one service; health and reflection pass by unseen."""

    def __init__(self, service: str, tracer: Tracer | None) -> None:
        self._service = service
        self._tracer = tracer

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> "RpcHandler | None":
        """Called by gRPC for each RPC, in the task that serves it."""
        service, _, method = details.method.removeprefix("/").partition("/")
        if service != self._service:
            return await continuation(details)
        headers = {key: value for key, value in details.invocation_metadata or () if isinstance(value, str)}
        REQUEST_ID.set(request_id(headers.get(_ID_HEADER)))
        handler: Any = await continuation(details)
        if handler is None:
            return handler  # a method that the service has not
        (name,) = (each for each in _BEHAVIOURS if getattr(handler, each))
        followed: RpcHandler = handler._replace(**{name: self._followed(getattr(handler, name), method, headers)})
        return followed

    def _followed(self, behaviour: Behaviour, method: str, headers: Mapping[str, str]) -> Behaviour:
        async def follow(request: Any, context: Context) -> Any:  # noqa: ANN401 - messages of any RPC
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
                    _note(method, context, code, span)

        return follow


def _note(method: str, context: Context, code: grpc.StatusCode, span: Span | None) -> None:
    if span:
        span.end(code.name)
    if code is grpc.StatusCode.OK or code in _LOGGED_WITH_CAUSE:
        return
    level = logging.DEBUG if code in _CALLERS_BUSINESS else logging.WARNING
    reason = " ".join(str(context.details() or "").split())
    _log.log(level, "%s from %s: %s: %s", method, context.peer(), code.name, reason, extra={"kind": code.name})
