"""Health checks that do not parse: the caller's mistake, and told as such."""

from typing import Any

import grpc
from google.protobuf.message import DecodeError

from vitwire.wire import Malformed
from vitwire_server.rpc.principals import HEALTH, Context, Continuation, RpcHandler


class HealthValidator(grpc.aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT where the stock health service would log a traceback and say INTERNAL."""

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> "RpcHandler | None":
        """Called by gRPC for each RPC, in the task that serves it."""
        handler: Any = await continuation(details)
        if handler is None or not details.method.startswith(HEALTH):
            return handler  # type: ignore[no-any-return]
        name = "unary_stream" if handler.response_streaming else "unary_unary"
        checked = {name: _checked(getattr(handler, name)), "request_deserializer": _reader(handler)}
        strict: RpcHandler = handler._replace(**checked)
        return strict


def _reader(handler: Any) -> Any:  # noqa: ANN401 - grpc's handlers and messages of any kind
    def read(raw: bytes) -> Any:  # noqa: ANN401 - as above
        try:
            return handler.request_deserializer(raw)
        except DecodeError as error:
            return Malformed(str(error))

    return read


def _checked(behaviour: Any) -> Any:  # noqa: ANN401 - as above
    async def answer(request: Any, context: Context) -> Any:  # noqa: ANN401 - as above
        if isinstance(request, Malformed):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "is no valid protobuf message")
        return await behaviour(request, context)

    return answer
