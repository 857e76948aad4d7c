"""Bounds how many one-message requests are received at once; until then only their largest size is known."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any, TypeVar

from vitwire_server.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, Violation
from vitwire_server.rpc.credentials import Caller, caller_of
from vitwire_server.rpc.grpc_types import Stream, read, wait_for_cancellation
from vitwire_server.scheduling.admission import SHARE

_FEWEST, _MOST = 4, 64
_WAIT_SECONDS = 5.0
_CROWDED_SECONDS = 1.0
"""Seconds a message may take to arrive while other requests wait for a slot."""
M = TypeVar("M")
Granted = asyncio.Future["_Slot"]


@dataclass(slots=True, eq=False)
class _Slot:
    """The right to receive one message."""

    caller: Caller
    since: float
    limit: asyncio.Timeout | None = None
    """Ends the reading; None until it has begun."""
    evicted: bool = False

    def evict(self) -> None:
        """End the reading now."""
        self.evicted = True
        if self.limit and not self.limit.expired():
            self.limit.reschedule(0.0)


class ReceiveSlots:
    """Receives only as many one-message requests at a time as fit into a bound at their largest size.

    gRPC holds a message in memory from its first byte on, before any handler sees it; but beyond the stream's
    flow control window it receives nothing until the message is read. So messages are read here, in turn.

    grpcio does not report the first bytes of a message, so a silent request takes a slot like any other.
    While others wait it loses the slot after a second, and one caller never holds all slots. A message that
    fits into the flow control window has arrived before its turn and needs the slot only for a moment.
    """

    def __init__(self, max_message_bytes: int, max_bytes: int, stall_seconds: float) -> None:
        """`stall_seconds` is how long a message may take to arrive while no other request waits."""
        self.slots = min(_MOST, max(_FEWEST, max_bytes // max_message_bytes))
        self._most_per_caller = int(self.slots * SHARE)
        self._stall_seconds = stall_seconds
        self._held: list[_Slot] = []
        self._waiting: dict[Caller, dict[Granted, float]] = {}
        """Requests in order of arrival, and when each arrived."""
        self._timer: asyncio.TimerHandle | None = None

    async def read(self, context: Stream[M, Any]) -> M:
        """The one message of an RPC. Raises Overloaded, DeadlineExceeded, or InvalidRequest if there is none."""
        caller = caller_of(context)
        slot = self._free(caller) or await self._granted(caller)
        try:
            async with asyncio.timeout(0.0 if slot.evicted else self._stall_seconds) as slot.limit:
                message = await read(context)
        except TimeoutError:
            raise self._too_slow(slot) from None
        finally:
            self._give_back(slot)
        if message is None:
            await wait_for_cancellation()
            raise InvalidRequest([Violation("message", "is missing: the stream ended without one")])
        return message

    def _free(self, caller: Caller) -> _Slot | None:
        """A slot if nobody waits and one is free for this caller, as nearly always."""
        if (
            self._waiting
            or len(self._held) >= self.slots
            or sum(slot.caller.name == caller.name for slot in self._held) >= self._most_per_caller
        ):
            return None
        self._held.append(slot := _Slot(caller, asyncio.get_running_loop().time()))
        return slot

    async def _granted(self, caller: Caller) -> _Slot:
        """A slot, once one is free for this caller. Raises Overloaded."""
        loop = asyncio.get_running_loop()
        granted: Granted = loop.create_future()
        self._waiting.setdefault(caller, {})[granted] = loop.time()
        self._review()
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                return await granted
        except BaseException as error:
            self._dequeue(caller, granted)
            if granted.done() and not granted.cancelled():
                self._give_back(granted.result())
            if isinstance(error, TimeoutError):
                raise self._none_free() from None
            raise

    def _give_back(self, slot: _Slot) -> None:
        self._held.remove(slot)
        if self._waiting:
            self._review()

    def _none_free(self) -> Overloaded:
        reason = (
            f"all {self.slots} receive slots, or the {self._most_per_caller} of this caller, were busy"
            f" for {_WAIT_SECONDS:g} s"
        )
        return Overloaded(reason, reason="bodies", retry_seconds=1.0)

    def _dequeue(self, caller: Caller, granted: Granted) -> None:
        """A request waits no longer; a second call does nothing."""
        waiting = self._waiting.get(caller, {})
        waiting.pop(granted, None)
        if not waiting:
            self._waiting.pop(caller, None)

    def _review(self) -> None:
        """Grant free slots; while requests still wait, evict slots that were held for too long."""
        now = asyncio.get_running_loop().time()
        while len(self._held) < self.slots and (caller := self._next()):
            granted = next(iter(self._waiting[caller]))
            self._dequeue(caller, granted)
            if not granted.done():
                self._held.append(slot := _Slot(caller, now))
                granted.set_result(slot)
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._waiting:
            self._evict(now)

    def _next(self) -> Caller | None:
        """Whose turn it is: first by fewest slots of the caller, then of the connection, then by arrival."""
        names, connections = self._slots_by_name(), Counter(slot.caller for slot in self._held)
        eligible = [caller for caller in self._waiting if names[caller.name] < self._most_per_caller]
        arrivals = {caller: next(iter(self._waiting[caller].values())) for caller in eligible}
        return min(eligible, key=lambda each: (names[each.name], connections[each], arrivals[each]), default=None)

    def _evict(self, now: float) -> None:
        """Evict as many slots as requests wait, first from the caller that holds the most."""
        names = self._slots_by_name()
        waiting = {caller.name for caller in self._waiting}
        any_helps = any(names[name] < self._most_per_caller for name in waiting)
        useful = [slot for slot in self._held if not slot.evicted and (any_helps or slot.caller.name in waiting)]
        wanted = sum(map(len, self._waiting.values())) - sum(slot.evicted for slot in self._held)
        overdue = [slot for slot in useful if slot.since + _CROWDED_SECONDS <= now]
        for slot in sorted(overdue, key=lambda each: (-names[each.caller.name], each.since))[: max(0, wanted)]:
            slot.evict()
        later = [slot.since + _CROWDED_SECONDS for slot in useful if slot.since + _CROWDED_SECONDS > now]
        if later:
            self._timer = asyncio.get_running_loop().call_at(min(later), self._review)

    def _slots_by_name(self) -> Counter[str]:
        return Counter(slot.caller.name for slot in self._held)

    def _too_slow(self, slot: _Slot) -> Overloaded | DeadlineExceeded:
        if not slot.evicted:
            return DeadlineExceeded(f"the message did not arrive within {self._stall_seconds:g} s")
        reason = (
            f"the message did not arrive within {_CROWDED_SECONDS:g} s while other requests waited for a receive slot;"
            " send large items through EncodeStream"
        )
        return Overloaded(reason, reason="bodies", retry_seconds=1.0)
