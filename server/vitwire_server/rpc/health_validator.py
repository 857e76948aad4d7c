"""Health checks that cannot be parsed are the caller's mistake, and answered as such."""

from collections.abc import Callable
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError

from vitwire.wire import Malformed
from vitwire_server.rpc.grpc_types import Behaviour, Context, Continuation, RpcHandler, deserializer, replaced
from vitwire_server.rpc.principals import HEALTH

M = TypeVar("M")
R = TypeVar("R")


class HealthValidator(grpc.aio.ServerInterceptor):
    """Answers INVALID_ARGUMENT where the stock health service would log a traceback and answer INTERNAL."""

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> RpcHandler | None:
        """Called by gRPC for each RPC, in the task that serves it."""
        handler = await continuation(details)
        if handler is None or not details.method.startswith(HEALTH):
            return handler
        return replaced(handler, _checked, _reader(deserializer(handler)))


def _reader(deserialize: Callable[[bytes], M]) -> Callable[[bytes], M | Malformed]:
    def read(raw: bytes) -> M | Malformed:
        try:
            return deserialize(raw)
        except DecodeError as error:
            return Malformed(str(error))

    return read


def _checked(behaviour: Behaviour[M, R]) -> Behaviour[M | Malformed, R]:
    async def answer(request: M | Malformed, context: Context) -> R:
        if isinstance(request, Malformed):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a valid protobuf message")
        return await behaviour(request, context)

    return answer
