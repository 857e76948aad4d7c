"""Turns of jobs at decoders."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from vitwire_server.scheduling.shares import NestedShares
from vitwire_server.scheduling.tickets import Priority

_QUANTUM = 50_000
"""Microseconds that a caller's turn is worth: a photograph of a megapixel."""
_LONG = 1_000_000
"""Microseconds beyond which a job counts as long."""
_MOST_PASSED_BY = 15
"""Interactive jobs in a row that may leave batch jobs waiting before one of these goes first, as in the engine."""


_LEAST_MICROSECONDS, _PIXELS_PER_MICROSECOND = 20_000, 20


def predicted(cost: int) -> int:
    """Predicted microseconds of a job that decodes `cost` pixels, which a decoder says that may be taken over."""
    return _LEAST_MICROSECONDS + max(0, cost) // _PIXELS_PER_MICROSECOND


class Flow(NamedTuple):
    """Whose job it is; callers take turns, then their connections, then the requests of these."""

    caller: str
    connection: str = ""
    request: int = 0
    priority: Priority = Priority.INTERACTIVE

    @property
    def path(self) -> tuple[str, str, int]:
        """For shares within shares."""
        return self.caller, self.connection, self.request


@dataclass(slots=True, eq=False)
class Turn:
    """A job that waits or runs."""

    flow: Flow
    cost: int
    """Predicted microseconds."""
    granted: asyncio.Future[None]
    is_open: bool = False
    """True if nothing bounds its cost but the limit: it counts as long."""
    is_long: bool = False
    """True if it counted as long when it was granted."""
    since: float | None = None
    """When it got its decoder, by the event loop's clock: from then on it is timed."""


@dataclass(slots=True)
class _Caller:
    """A caller whose jobs wait or run."""

    jobs: int = 0
    long: int = 0
    """Jobs that run and count as long."""
    pace: float = 1.0
    """Measured over predicted time of its last jobs, at least 1: files may cost more than their headers say."""


@dataclass(slots=True)
class Turns:
    """Grants places by deficit round robin on predicted time, interactive jobs first. Used on one event loop.

    Long jobs of one caller leave a place free, if there are two or more, so that others need not wait for them.
    """

    places: int
    changed: Callable[[], None]
    """Called when the number of waiting jobs changed."""
    waiting: int = 0
    _running: int = 0
    _levels: dict[Priority, NestedShares[Turn]] = field(
        default_factory=lambda: {level: NestedShares(_QUANTUM) for level in Priority}
    )
    _callers: dict[str, _Caller] = field(default_factory=dict)
    _passed_by: int = 0

    async def acquire(self, flow: Flow, cost: int, *, is_open: bool = False) -> Turn:
        """A place for a job of predicted microseconds, in turn. A cancelled job leaves the line."""
        turn = Turn(flow, cost, asyncio.get_running_loop().create_future(), is_open)
        self._callers.setdefault(flow.caller, _Caller()).jobs += 1
        self._levels[flow.priority].push(flow.path, turn, cost)
        self._count(1)
        self._grant_if_possible(turn)
        try:
            await turn.granted
        except asyncio.CancelledError:
            if turn.granted.cancelled():
                self._levels[flow.priority].drop(flow.path, turn)
                self._count(-1)
                self._leave(flow.caller)
                self._grant_if_possible(self._levels[flow.priority].first(flow.path))
            else:
                self.release(turn)
            raise
        return turn

    def release(self, turn: Turn) -> None:
        """The job is done. What it took beyond its prediction is charged to its caller."""
        self._running -= 1
        caller = self._callers[turn.flow.caller]
        caller.long -= turn.is_long
        if turn.since is not None:
            took = round((asyncio.get_running_loop().time() - turn.since) * 1e6)
            caller.pace = max(1.0, (caller.pace + took / turn.cost) / 2)
            self._levels[turn.flow.priority].charge(turn.flow.path, max(0, took - turn.cost))
        self._leave(turn.flow.caller)
        self._grant()

    def _grant_if_possible(self, turn: Turn | None) -> None:
        """Of all that waits, only this job can be new to the choice: floods are not searched for each of their jobs."""
        if turn and self._may_run(turn):
            self._grant()

    def _grant(self) -> None:
        while self._running < self.places and (turn := self._next()):
            flow = turn.flow
            self._levels[flow.priority].take(flow.path, turn)
            is_batch = flow.priority is Priority.BATCH
            self._passed_by = 0 if is_batch or not self._levels[Priority.BATCH] else self._passed_by + 1
            self._count(-1)
            turn.is_long = self._is_long(turn)
            self._callers[flow.caller].long += turn.is_long
            self._running += 1
            turn.granted.set_result(None)

    def _next(self) -> Turn | None:
        levels = reversed(Priority) if self._passed_by >= _MOST_PASSED_BY else Priority
        heads = (turn for level in levels for turn in self._levels[level].heads())
        return next((turn for turn in heads if self._may_run(turn)), None)

    def _may_run(self, turn: Turn) -> bool:
        free_of_long = self.places > 1 and self._callers[turn.flow.caller].long >= self.places - 1
        return not turn.granted.cancelled() and not (free_of_long and self._is_long(turn))

    def _is_long(self, turn: Turn) -> bool:
        return turn.is_open or turn.cost * self._callers[turn.flow.caller].pace > _LONG

    def _count(self, change: int) -> None:
        self.waiting += change
        self.changed()

    def _leave(self, name: str) -> None:
        caller = self._callers[name]
        caller.jobs -= 1
        if not caller.jobs:
            del self._callers[name]
