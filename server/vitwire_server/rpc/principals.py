"""Authentication by token, and the names that callers are known by."""

from contextvars import ContextVar
from typing import NamedTuple

import grpc

from vitwire_server.rpc.credentials import Tokens
from vitwire_server.rpc.grpc_types import Context, Continuation, RpcHandler

HEALTH = "/grpc.health.v1.Health/"
_SCHEME = "bearer "
_token_name: ContextVar[str] = ContextVar("token_name", default="")


def principal(context: Context) -> str:
    """The name of the caller's token, or `certificate:` and the name of its certificate; "" without either.

    What one principal sent must never be visible to another.
    """
    if name := _token_name.get():
        return name
    identities = context.peer_identities() or ()
    return "certificate:" + ",".join(each.decode(errors="replace") for each in identities) if identities else ""


class Caller(NamedTuple):
    """What shares of receive slots and permits are counted by."""

    name: str
    """The principal; the host where all callers are one principal."""
    connection: str


def caller_of(context: Context) -> Caller:
    """The caller of an RPC."""
    peer = context.peer() or ""  # `ipv4:10.0.0.1:5000`, `ipv6:%5B::1%5D:5000` or `unix:`
    return Caller(principal(context) or peer.rpartition(":")[0], peer)


class TokenAuth(grpc.aio.ServerInterceptor):
    """Refuses RPCs without a valid token before a message is read; health checks need none."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def intercept_service(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> RpcHandler | None:
        """Called by gRPC for each RPC, in the task that serves it."""
        if not details.method.startswith(HEALTH):
            token = _bearer(details)
            name = self._tokens.name(token) if token else None
            if name is None:
                return _refusal("the bearer token is not valid" if token else "a bearer token is required")
            _token_name.set(name)
        return await continuation(details)


def _bearer(details: grpc.HandlerCallDetails) -> str:
    """The caller's token; empty without one."""
    for key, value in details.invocation_metadata or ():
        if key == "authorization" and isinstance(value, str) and value[: len(_SCHEME)].lower() == _SCHEME:
            return value[len(_SCHEME) :].strip()
    return ""


def _refusal(reason: str) -> RpcHandler:
    """A handler that answers any kind of RPC without reading from it."""

    async def refuse(_: object, context: Context) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)

    return grpc.stream_stream_rpc_method_handler(refuse)
