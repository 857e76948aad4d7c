"""One request in flight."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from vitwire_server.core.items import Item
from vitwire_server.core.reports import Outcome
from vitwire_server.scheduling.groups import Clip


class Priority(IntEnum):
    """Which requests go first; lower goes first."""

    INTERACTIVE = 0
    BATCH = 1


@dataclass(slots=True, eq=False)
class Ticket:
    """A request in flight: its deadline and the receiver of its outcomes.

    `deliver(item, outcome)` is called by the engine's thread, unless the ticket was cancelled: once per submitted
    item, before that for rows of a clip. Owned by the RPC that opened it; `cancelled` is set through the intake.
    """

    deliver: Callable[[int, Outcome], None]
    deadline: float | None = None
    """Seconds on the scheduler's clock; None waits forever."""
    priority: Priority = Priority.INTERACTIVE
    cancelled: bool = False
    request_id: str = ""
    """The request's id in the log; empty outside of an RPC."""

    def is_expired(self, now: float) -> bool:
        """True once the deadline has passed."""
        return self.deadline is not None and self.deadline <= now


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One item waiting, with the ticket it belongs to."""

    ticket: Ticket
    index: int
    """Position of the item in its request."""
    item: Item
    arrived: float
    clip: Clip | None = None
    """The clip that the item is a part of."""

    def is_void(self, now: float) -> bool:
        """True once the deadline has passed, or another part of the clip failed."""
        return self.ticket.is_expired(now) or (self.clip is not None and self.clip.failed)
