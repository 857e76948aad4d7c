"""How many messages may be on their way in at once, before anything is known of them but their bound."""

import asyncio
from typing import Any

import grpc

from vitwire_server.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, Violation

Context = grpc.aio.ServicerContext[Any, Any]
_FEWEST, _MOST = 4, 64
_TURN_SECONDS = 5.0


class Bodies:
    """Lets so many one-message requests be received at a time that their largest bodies fit into a bound.

    gRPC holds a message in memory from its first byte on, before any handler sees it; but it receives
    none that nobody asked for, beyond a stream's flow control window. So a message is asked for here, in turn.
    """

    def __init__(self, max_message_bytes: int, max_bytes: int, patience: float) -> None:
        """`patience` is how many seconds a message may take to arrive."""
        self.slots = min(_MOST, max(_FEWEST, max_bytes // max_message_bytes))
        self._patience = patience
        self._free = asyncio.Semaphore(self.slots)

    async def read(self, context: Context) -> Any:  # noqa: ANN401 - what the method's deserialiser makes of it
        """The one message of an RPC. Raises Overloaded, DeadlineExceeded, or InvalidRequest where there is none."""
        try:
            async with asyncio.timeout(_TURN_SECONDS):
                await self._free.acquire()
        except TimeoutError:
            reason = f"{self.slots} messages are on their way in, none of which got done in {_TURN_SECONDS:g} s"
            raise Overloaded(reason, reason="bodies", retry_seconds=1.0) from None
        try:
            async with asyncio.timeout(self._patience):
                message = await context.read()
        except TimeoutError:
            raise DeadlineExceeded(f"the message did not arrive within {self._patience:g} s") from None
        finally:
            self._free.release()
        if message is grpc.aio.EOF:
            raise InvalidRequest([Violation("message", "is missing: the stream ended without one")])
        return message
