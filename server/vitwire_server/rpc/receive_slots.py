"""Bounds how many one-message requests are received at once; until then only their largest size is known."""

import asyncio
from typing import Any, TypeVar

from vitwire.shared.fairness.places import Place, Places
from vitwire_server.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, Violation
from vitwire_server.rpc.credentials import caller_of
from vitwire_server.rpc.grpc_types import Stream, read, wait_for_cancellation

_FEWEST, _MOST = 4, 64
_WAIT_SECONDS = 5.0
_CROWDED_SECONDS = 1.0
"""Seconds a message may take to arrive while other requests wait for a slot."""
M = TypeVar("M")


class ReceiveSlots:
    """Receives only as many one-message requests at a time as fit into a bound at their largest size.

    gRPC holds a message in memory from its first byte on, before any handler sees it; but beyond the stream's
    flow control window it receives nothing until the message is read. So each message is read here, in its slot.

    grpcio does not report the first bytes of a message, so a silent request takes a slot like any other.
    While others wait it loses the slot after a second, and one caller never holds all slots. A message that
    fits into the flow control window has arrived when its request gets a slot, and holds it only for a moment.
    """

    def __init__(self, max_message_bytes: int, max_bytes: int, stall_seconds: float) -> None:
        """`stall_seconds` is how long a message may take to arrive while no other request waits."""
        self.slots = Places(min(_MOST, max(_FEWEST, max_bytes // max_message_bytes)), grace=_CROWDED_SECONDS)
        self._stall_seconds = stall_seconds

    async def read(self, context: Stream[M, Any]) -> M:
        """The one message of an RPC. Raises Overloaded, DeadlineExceeded, or InvalidRequest if there is none."""
        try:
            slot = await self.slots.acquire((0, *caller_of(context)), wait=_WAIT_SECONDS)
        except TimeoutError:
            raise self._none_free() from None
        slot.begin()
        try:
            async with asyncio.timeout(0.0 if slot.is_lost else self._stall_seconds) as slot.limit:
                message = await read(context)
        except TimeoutError:
            raise self._too_slow(slot) from None
        finally:
            self.slots.give_back(slot)
        if message is None:
            await wait_for_cancellation()
            raise InvalidRequest([Violation("message", "is missing: the stream ended without one")])
        return message

    def _none_free(self) -> Overloaded:
        reason = (
            f"all {self.slots.limit} receive slots, or the {self.slots.share} of this caller, were busy"
            f" for {_WAIT_SECONDS:g} s"
        )
        return Overloaded(reason, reason="bodies", retry_seconds=1.0)

    def _too_slow(self, slot: Place) -> Overloaded | DeadlineExceeded:
        if not slot.is_lost:
            return DeadlineExceeded(f"the message did not arrive within {self._stall_seconds:g} s")
        reason = (
            f"the message did not arrive within {_CROWDED_SECONDS:g} s while other requests waited for a receive slot;"
            " send large items through EncodeStream"
        )
        return Overloaded(reason, reason="bodies", retry_seconds=1.0)
