"""Amounts that requests hold together: one caller has at most a share of each. Used on one event loop."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import asynccontextmanager

_GRACE_SECONDS = 2.0
"""A body may lag behind the slowest rate this long before it loses its place to others."""
_SLOWEST = 64 << 10
"""Bytes a second that a body must reach to keep its place."""


def share_of(whole: int) -> int:
    """The part of an amount that one caller may have: a single one, as behind a proxy, loses little by it."""
    return whole - whole // 4


class Full(Exception):
    """Nothing is left, for this caller or at all."""


class Holding:
    """The part of a budget that one request holds."""

    def __init__(self, budget: "Budget", caller: Hashable) -> None:
        """`caller` is whose share it counts against; None if it counts against nobody's."""
        self.caller = caller
        self.held = 0
        self.due = math.inf
        """When others may have it, on the loop's clock."""
        self.is_lost = False
        """Others have got it."""
        self._budget = budget
        self.limit: asyncio.Timeout | None = None
        """The timeout of the block in which it may be lost, while that is entered."""

    def take(self, amount: int) -> None:
        """Hold more. Raises the budget's refusal."""
        if not self._budget.make_room(self, amount):
            raise self._budget.refusal()
        self._budget.count(self, amount)

    def release(self) -> None:
        self._budget.count(self, -self.held)

    @asynccontextmanager
    async def losable(self, seconds: float, grace: float = _GRACE_SECONDS) -> AsyncGenerator[None, None]:
        """A block that takes `seconds` at most, and less if others need what is held after the grace.

        Raises TimeoutError for either; `is_lost` says which.
        """
        try:
            async with asyncio.timeout(None if math.isinf(seconds) else seconds) as self.limit:
                self.due = now() + grace
                self.hurry()
                yield
        finally:
            self.due, self.limit = math.inf, None

    def advance(self, received: int) -> None:
        """Note bytes of a body that have arrived."""
        self.due = min(max(self.due, now()) + received / _SLOWEST, now() + _GRACE_SECONDS)
        self.hurry()

    def lose(self) -> None:
        """Leave what is held to others, and end the block in which it may be lost."""
        self.is_lost = True
        self.release()
        if self.limit and not self.limit.expired():
            self.limit.reschedule(0.0)

    def hurry(self) -> None:
        """While the budget drains, let the block end when it is due."""
        if self._budget.is_draining and self.limit and not self.limit.expired():
            when = self.limit.when()
            self.limit.reschedule(self.due if when is None else min(when, self.due))


class Budget:
    """An amount that requests hold together. `refusal` makes the error for what exceeds it."""

    def __init__(self, limit: int, refusal: Callable[[], Exception] = Full, share: int | None = None) -> None:
        """`share` is what one caller may hold of it; None for three quarters."""
        self.used = 0
        self.is_draining = False
        self.refusal = refusal
        self.limit = limit
        self.share = share_of(limit) if share is None else share
        self._by_caller: dict[Hashable, int] = {}
        self._holdings: set[Holding] = set()

    @asynccontextmanager
    async def holding(self, caller: str, amount: int = 0) -> AsyncGenerator[Holding, None]:
        """A request of this caller holds it in the block, and may take more. Raises the refusal."""
        holding = Holding(self, caller)
        self._holdings.add(holding)
        try:
            if amount:
                holding.take(amount)
            yield holding
        finally:
            holding.release()
            self._holdings.discard(holding)

    def check(self, caller: str) -> None:
        """Raises the refusal if this caller gets no more, unless others lose theirs."""
        if self.used >= self.limit or self._by_caller.get(caller, 0) >= self.share:
            raise self.refusal()

    def make_room(self, holding: Holding, amount: int) -> bool:
        """Let those lose what they hold who are due, until there is room; False if there is none.

        A request alone of its caller may exceed the caller's share.
        """
        while not holding.is_lost:
            has, caller = self._by_caller.get(holding.caller, 0), holding.caller
            is_over = caller is not None and has > holding.held and has + amount > self.share
            if not is_over and self.used + amount <= self.limit:
                return True
            victim = self._loser(holding, caller if is_over else None)
            if victim is None:
                break
            victim.lose()
        return False

    def count(self, holding: Holding, amount: int) -> None:
        """Count what a holding took, or gave if negative."""
        holding.held += amount
        self.used += amount
        if has := self._by_caller.get(holding.caller, 0) + amount:
            self._by_caller[holding.caller] = has
        else:
            self._by_caller.pop(holding.caller, None)

    def drain(self) -> None:
        """From now on, blocks in which something may be lost end when they are due."""
        self.is_draining = True
        for holding in self._holdings:
            holding.hurry()

    def _loser(self, taking: Holding, caller: Hashable) -> Holding | None:
        """Whoever is due, first of the caller that holds the most. `caller`: the only one that may lose, if any."""
        due = (
            each
            for each in self._holdings
            if each is not taking and each.held and each.due <= now() and caller in (None, each.caller)
        )
        return max(due, key=lambda each: (self._by_caller[each.caller], -each.due), default=None)


def now() -> float:
    """The time on the loop's clock."""
    return asyncio.get_running_loop().time()
