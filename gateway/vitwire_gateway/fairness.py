"""Shares of callers: amounts that they hold, and turns for work. Used by the event loop only.

One caller gets at most three quarters of either, so that the rest stays free for others.
"""

import asyncio
import ipaddress
import math
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

_GRACE_SECONDS = 2.0
"""A body may lag behind the slowest rate this long before it loses its place to others."""
_SLOWEST = 64 << 10
"""Bytes a second that a body must reach to keep its place."""
_IPV6_PREFIX = 64
"""One host chooses freely among the addresses of such a network."""
_numbers = count()


class Caller(NamedTuple):
    """Who asks for something: a name that all requests of a caller share, and the request."""

    name: str
    request: int

    @classmethod
    def of(cls, name: str) -> "Caller":
        """A new request of a caller."""
        return cls(name, next(_numbers))


def host_name(address: str) -> str:
    """The caller's name by its address, if nothing better is known: the host, or the network of an IPv6 host."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address) and not found.ipv4_mapped:
        return str(ipaddress.ip_network((int(found), _IPV6_PREFIX), strict=False))
    return str(getattr(found, "ipv4_mapped", None) or found)


def most_of(whole: int) -> int:
    """The part of an amount that one caller may have."""
    return whole - whole // 4


class Full(Exception):
    """Nothing is left, for this caller or at all."""


class Holding:
    """The part of a budget that one request holds."""

    def __init__(self, budget: "Budget", name: str) -> None:
        self.name = name
        self.held = 0
        self.due = math.inf
        """When others may have it, on the loop's clock."""
        self.is_lost = False
        """Others have got it."""
        self._budget = budget
        self._limit: asyncio.Timeout | None = None

    def take(self, amount: int) -> None:
        """Hold more. Raises the budget's refusal."""
        self._budget.make_room(self, amount)
        self._budget.count(self, amount)

    def release(self) -> None:
        self._budget.count(self, -self.held)

    @asynccontextmanager
    async def losable(self, seconds: float, grace: float = _GRACE_SECONDS) -> AsyncGenerator[None, None]:
        """A block that takes `seconds` at most, and less if others need what is held after the grace.

        Raises TimeoutError for either; `is_lost` says which.
        """
        try:
            async with asyncio.timeout(None if math.isinf(seconds) else seconds) as self._limit:
                self.due = _now() + grace
                self.hurry()
                yield
        finally:
            self.due, self._limit = math.inf, None

    def advance(self, received: int) -> None:
        """Note bytes of a body that have arrived."""
        self.due = min(max(self.due, _now()) + received / _SLOWEST, _now() + _GRACE_SECONDS)
        self.hurry()

    def lose(self) -> None:
        """Leave what is held to others, and end the block in which it may be lost."""
        self.is_lost = True
        self.release()
        if self._limit and not self._limit.expired():
            self._limit.reschedule(0.0)

    def hurry(self) -> None:
        """While the budget drains, let the block end when it is due."""
        if self._budget.is_draining and self._limit and not self._limit.expired():
            when = self._limit.when()
            self._limit.reschedule(self.due if when is None else min(when, self.due))


class Budget:
    """An amount that requests hold together. `refusal` makes the error for what exceeds it."""

    def __init__(self, limit: int, refusal: Callable[[], Exception] = Full) -> None:
        self.used = 0
        self.is_draining = False
        self._limit = limit
        self._refusal = refusal
        self._by_name: Counter[str] = Counter()
        self._holdings: set[Holding] = set()

    @asynccontextmanager
    async def holding(self, name: str, amount: int = 0) -> AsyncGenerator[Holding, None]:
        """A request of this caller holds it in the block, and may take more. Raises the refusal."""
        holding = Holding(self, name)
        self._holdings.add(holding)
        try:
            if amount:
                holding.take(amount)
            yield holding
        finally:
            holding.release()
            self._holdings.discard(holding)

    def check(self, name: str) -> None:
        """Raises the refusal if this caller gets no more, unless others lose theirs."""
        if self.used >= self._limit or self._by_name[name] >= most_of(self._limit):
            raise self._refusal()

    def make_room(self, holding: Holding, amount: int) -> None:
        """Let those lose what they hold who are due, until there is room. Raises the refusal.

        A request alone of its caller may exceed the caller's part.
        """
        while not holding.is_lost:
            others = self._by_name[holding.name] - holding.held
            is_over = bool(others) and self._by_name[holding.name] + amount > most_of(self._limit)
            if not is_over and self.used + amount <= self._limit:
                return
            victim = self._loser(holding, holding.name if is_over else None)
            if victim is None:
                break
            victim.lose()
        raise self._refusal()

    def count(self, holding: Holding, amount: int) -> None:
        """Count what a holding took, or gave if negative."""
        holding.held += amount
        self.used += amount
        self._by_name[holding.name] += amount
        if not self._by_name[holding.name]:
            del self._by_name[holding.name]

    def drain(self) -> None:
        """From now on, blocks in which something may be lost end when they are due."""
        self.is_draining = True
        for holding in self._holdings:
            holding.hurry()

    def _loser(self, taking: Holding, name: str | None) -> Holding | None:
        """Whoever is due, first of the caller that holds the most."""
        due = (
            each
            for each in self._holdings
            if each is not taking and each.held and each.due <= _now() and name in (None, each.name)
        )
        return max(due, key=lambda each: (self._by_name[each.name], -each.due), default=None)


class Turn(NamedTuple):
    """The right to work, until it ends."""

    turns: "Turns"
    caller: Caller
    began: float

    def end(self) -> None:
        """Let others have it; its time counts for the caller and the request. Call once."""
        self.turns.end(self)


@dataclass(slots=True)
class _Work:
    """Of a caller or a request that has turns; one that is new begins with the least seconds of its kind."""

    seconds: float
    turns: int = 0
    """That wait or run."""
    running: int = 0
    waiting: deque[asyncio.Future[Turn]] = field(default_factory=deque)
    """Of a request."""


class Turns:
    """Some turns at a time. The next goes to the caller that has worked for the shortest time, then to its request."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._most = most if most == 1 else min(most_of(most), most - 1)
        self._callers: dict[str, _Work] = {}
        self._requests: dict[Caller, _Work] = {}

    @asynccontextmanager
    async def turn(self, caller: Caller) -> AsyncGenerator[None, None]:
        """A turn for the time of the block."""
        turn = await self.begin(caller)
        try:
            yield
        finally:
            turn.end()

    async def begin(self, caller: Caller) -> Turn:
        """A turn, once it is due."""
        granted: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._enter(caller)
        self._requests[caller].waiting.append(granted)
        self._grant()
        try:
            return await granted
        except BaseException:
            if granted.done() and not granted.cancelled():
                granted.result().end()
            else:
                if granted in self._requests[caller].waiting:
                    self._requests[caller].waiting.remove(granted)
                self._leave(caller)
            raise

    def end(self, turn: Turn) -> None:
        """As `Turn.end`."""
        for work in self._both(turn.caller):
            work.seconds += _now() - turn.began
            work.running -= 1
        self._free += 1
        self._leave(turn.caller)
        self._grant()

    def _grant(self) -> None:
        while self._free and (caller := self._next()):
            granted = self._requests[caller].waiting.popleft()
            if not granted.cancelled():
                self._free -= 1
                for work in self._both(caller):
                    work.running += 1
                granted.set_result(Turn(self, caller, _now()))

    def _next(self) -> Caller | None:
        eligible = (
            each
            for each, work in self._requests.items()
            if work.waiting and self._callers[each.name].running < self._most
        )
        return min(eligible, key=lambda each: [(of.seconds, of.running) for of in self._both(each)], default=None)

    def _both(self, caller: Caller) -> tuple[_Work, _Work]:
        return self._callers[caller.name], self._requests[caller]

    def _enter(self, caller: Caller) -> None:
        if caller.name not in self._callers:
            self._callers[caller.name] = _Work(min((work.seconds for work in self._callers.values()), default=0.0))
        if caller not in self._requests:
            siblings = (work.seconds for each, work in self._requests.items() if each.name == caller.name)
            self._requests[caller] = _Work(min(siblings, default=0.0))
        for work in self._both(caller):
            work.turns += 1

    def _leave(self, caller: Caller) -> None:
        for work in self._both(caller):
            work.turns -= 1
        if not self._requests[caller].turns:
            del self._requests[caller]
        if not self._callers[caller.name].turns:
            del self._callers[caller.name]


def _now() -> float:
    return asyncio.get_running_loop().time()
