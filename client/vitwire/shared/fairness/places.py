"""Places for jobs that wait for them, by deficit round robin on the time that jobs take. Used on one event loop."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import asynccontextmanager

from vitwire.shared.fairness.budgets import Budget, Holding, now, share_of
from vitwire.shared.fairness.shares import Path, Shares

_QUANTUM = 50_000
"""Microseconds that a turn is worth: a photograph of a megapixel is decoded in it."""


class Place(Holding):
    """The right to do a job, or the wait for it."""

    def __init__(self, places: "Places", path: Path, cost: int, *, is_open: bool) -> None:
        super().__init__(places, None)
        self.path = path
        self.name = path[1]
        self.cost = cost
        self.is_open = is_open
        self.granted: asyncio.Future[None]  # of a job that waits
        self.since: float | None = None
        """When its job began, on the loop's clock: from then on it is timed."""

    def begin(self) -> None:
        """From now on, its caller pays for the time."""
        self.since = now()


class Places(Budget):
    """Some jobs at a time; the next of those that wait is chosen by deficit round robin on microseconds.

    The outermost flow is the caller. A share of the places is all that one caller gets, at least for long jobs, so that
    others need not wait for these.
    """

    def __init__(
        self,
        most: int,
        *,
        share: int | None = None,
        long: int = -1,
        grace: float = math.inf,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`most` jobs at a time, `share` of them of one caller: three quarters if None, but never all of several.

        long: microseconds beyond which a job counts against the share; all do by default.
        grace: seconds after which a place may be lost to others that wait, and its `limit` ends.
        changed: called when the number of waiting jobs changed.
        """
        super().__init__(most, share=max(1, min(share_of(most), most - 1)) if share is None else share)
        self._long = long
        self._grace = grace
        self._changed = changed
        self._line = Shares[Place](_QUANTUM)
        self._paces: dict[Hashable, float] = {}
        """Measured over predicted time of a caller's last jobs, at least 1: jobs may cost more than was predicted."""
        self._uncontested = set[Place]()
        """Places that were given since nothing waited: their flows are not in the line yet."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """The number of jobs that wait."""
        return len(self._line)

    @asynccontextmanager
    async def place(self, path: Path) -> AsyncGenerator[Place, None]:
        """A place for the block, which is timed."""
        place = await self.acquire(path)
        try:
            place.begin()
            yield place
        finally:
            self.give_back(place)

    async def acquire(self, path: Path, cost: int = 1, *, is_open: bool = False, wait: float | None = None) -> Place:
        """A place for a job of predicted microseconds, once it is its turn. A cancelled job leaves the line.

        is_open: nothing bounds its cost, so it counts as long. Raises TimeoutError after `wait` seconds.
        """
        place = Place(self, path, cost, is_open=is_open)
        self._charge_share(place)
        if not self._line and self.make_room(place, 1):
            self._hold(place)
            self._uncontested.add(place)
            return place
        for each in self._uncontested:
            self._line.begin(each.path)
        self._uncontested.clear()
        place.granted = asyncio.get_running_loop().create_future()
        self._line.push(path, place, cost)
        self._changed()
        self._grant_if_possible(place)
        try:
            async with asyncio.timeout(wait):
                await place.granted
        except (asyncio.CancelledError, TimeoutError):
            if place.granted.cancelled():
                self._line.drop(path, place)
                self._changed()
                self._forget_idle(place.name)
                self._grant_if_possible(self._line.first(path))
            else:
                self.give_back(place)
            raise
        return place

    def give_back(self, place: Place) -> None:
        """The job is done. What it took beyond its prediction is charged to its flows."""
        place.release()
        self._holdings.discard(place)
        took = 0
        if place.since is not None:
            took = round((now() - place.since) * 1e6)
            if self._long >= 0:
                self._paces[place.name] = max(1.0, (self._pace(place) + took / place.cost) / 2)
        if place in self._uncontested:
            self._uncontested.discard(place)
        else:
            self._line.end(place.path, max(0, took - place.cost))
        self._forget_idle(place.name)
        if self._line:
            self._grant()

    def _hold(self, place: Place) -> None:
        place.due = now() + self._grace
        self._holdings.add(place)
        self.count(place, 1)

    def _grant_if_possible(self, place: Place | None) -> None:
        """Only this job can be new to the choice: floods are not searched for each of their jobs."""
        if place:
            self._charge_share(place)
            if not place.granted.cancelled() and self.make_room(place, 1):
                self._grant()
        self._watch()

    def _grant(self) -> None:
        while self._line and (place := self._next()):
            self._hold(place)
            self._line.begin(place.path)
            self._line.take([(place.path, place)])
            self._changed()
            place.granted.set_result(None)
        self._watch()

    def _next(self) -> Place | None:
        at = now()
        is_any_due = any(each.due <= at for each in self._holdings)
        if self.used >= self.limit and not is_any_due:
            return None
        all_count = self._long < 0 and not is_any_due
        without_room = {name for name, has in self._by_caller.items() if all_count and has >= self.share}
        for place in self._line.heads(frozenset(without_room)):
            self._charge_share(place)
            if place.caller not in without_room and not place.granted.cancelled():
                if self.make_room(place, 1):
                    return place
                without_room.add(place.caller)
        return None

    def _charge_share(self, place: Place) -> None:
        """Let it count against its caller's share if it is long."""
        is_long = place.is_open or place.cost * self._pace(place) > self._long
        place.caller = place.name if is_long else None

    def _pace(self, place: Place) -> float:
        return self._paces.get(place.name, 1.0)

    def _forget_idle(self, name: Hashable) -> None:
        is_idle = name in self._paces and not self._line.has_flow(name)
        if is_idle and not any(each.name == name for each in self._uncontested):
            del self._paces[name]

    def _watch(self) -> None:
        """Look again when the next place may be lost to those that wait."""
        if self._line and not self._timer and not math.isinf(self._grace):
            at = now()
            when = min((each.due for each in self._holdings if each.due > at), default=math.inf)
            if not math.isinf(when):
                self._timer = asyncio.get_running_loop().call_at(when, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._grant()
