"""Names for gRPC's types, and typed access to what its stubs leave out."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import grpc

M = TypeVar("M")
R = TypeVar("R")

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Stream: TypeAlias = grpc.aio.ServicerContext[M, R]
"""The context of an RPC that reads messages of one type and writes another type."""
Behaviour: TypeAlias = Callable[[M, Context], Awaitable[R]]
"""The method behind an RPC."""
if TYPE_CHECKING:  # generic in the stubs only
    RpcHandler: TypeAlias = grpc.RpcMethodHandler[Any, Any]
else:
    RpcHandler = grpc.RpcMethodHandler
Continuation: TypeAlias = Callable[[grpc.HandlerCallDetails], Awaitable[RpcHandler | None]]

_log = logging.getLogger(__name__)
_CANCELLATION_SECONDS = 0.1
_METHODS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


async def read(context: Stream[M, Any]) -> M | None:
    """The next message; None at the end of the stream."""
    message = await context.read()
    return None if message is grpc.aio.EOF else message


@contextmanager
def cancelled_if_gone(doing: str) -> Iterator[None]:
    """Raises CancelledError if the client is gone: gRPC raises errors of its private core then."""
    try:
        yield
    except (grpc.aio.AbortError, TimeoutError):
        raise
    except Exception as error:  # noqa: BLE001 - see above
        _log.debug("a client left while %s: %r", doing, error)
        raise asyncio.CancelledError from None


async def wait_for_cancellation() -> None:
    """Call when a stream ended too early: waits for the cancellation that may have ended it.

    When an RPC is cancelled or its deadline passes, gRPC ends its messages just before it cancels its task.
    """
    await asyncio.sleep(_CANCELLATION_SECONDS)


def replaced(handler: RpcHandler, wrap: Callable[[Behaviour[Any, Any]], Behaviour[Any, Any]]) -> RpcHandler:
    """The handler with its method wrapped."""
    fields: Any = handler  # a named tuple, which the stubs do not say
    (name,) = (each for each in _METHODS if getattr(fields, each))
    changed: RpcHandler = fields._replace(**{name: wrap(getattr(fields, name))})
    return changed
