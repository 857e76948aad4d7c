"""What requests share: amounts that callers hold, and turns for work. Used by the event loop only.

One caller gets at most three quarters of either, so that the rest stays free for others.
"""

import asyncio
import ipaddress
import math
from collections import Counter, deque
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from itertools import count
from typing import NamedTuple

_GRACE_SECONDS = 2.0
"""How far a body may lag behind the slowest rate before it loses its place to others."""
_SLOWEST = 64 << 10
"""Bytes a second that a body must reach to keep its place."""
_IPV6_PREFIX = 64
"""One host chooses freely among the addresses of such a network."""
_numbers = count()


class Caller(NamedTuple):
    """Who asks for something: a name that is shared by all requests of a caller, and the request."""

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
    """What one caller may have of an amount."""
    return whole - whole // 4


class Full(Exception):
    """Nothing is left, for this caller or at all."""


class Holding:
    """What one request holds of a budget."""

    def __init__(self, budget: "Budget", name: str) -> None:
        self.name = name
        self.held = 0
        self.due = math.inf
        """When others may have it, on the loop's clock."""
        self.is_lost = False
        """Whether others have got it."""
        self._budget = budget
        self._limit: asyncio.Timeout | None = None

    def take(self, amount: int) -> None:
        """Hold more. Raises Full."""
        if self.is_lost:
            raise Full
        self._budget.make_room(self, amount)
        self._add(amount)

    def give(self, amount: int) -> None:
        """Hold less."""
        self._add(-min(amount, self.held))

    @asynccontextmanager
    async def losable(self, seconds: float, grace: float = _GRACE_SECONDS) -> AsyncGenerator[None, None]:
        """A block that takes `seconds` at most, and less if others need what is held after the grace.

        Raises TimeoutError for either; `is_lost` says which.
        """
        try:
            async with asyncio.timeout(None if math.isinf(seconds) else seconds) as self._limit:
                self.due = self._now() + grace
                self._hurry()
                yield
        finally:
            self.due, self._limit = math.inf, None

    def advance(self, received: int) -> None:
        """Note bytes of a body that have arrived."""
        now = self._now()
        self.due = min(max(self.due, now) + received / _SLOWEST, now + _GRACE_SECONDS)
        self._hurry()

    def lose(self) -> None:
        """Leave what is held to others, and end the block in which it may be lost."""
        self.is_lost = True
        self.give(self.held)
        if self._limit and not self._limit.expired():
            self._limit.reschedule(0.0)

    def _hurry(self) -> None:
        """While the budget drains, the block ends when it is due."""
        if self._budget.is_draining and self._limit and not self._limit.expired():
            when = self._limit.when()
            self._limit.reschedule(self.due if when is None else min(when, self.due))

    def _add(self, amount: int) -> None:
        self.held += amount
        self._budget.count(self, amount)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class Budget:
    """An amount that requests hold together."""

    def __init__(self, limit: int) -> None:
        self.used = 0
        self.is_draining = False
        self._limit = limit
        self._by_name: Counter[str] = Counter()
        self._holdings: set[Holding] = set()

    @asynccontextmanager
    async def holding(self, name: str) -> AsyncGenerator[Holding, None]:
        """Nothing yet, for the time of the block."""
        holding = Holding(self, name)
        self._holdings.add(holding)
        try:
            yield holding
        finally:
            holding.give(holding.held)
            self._holdings.discard(holding)

    def is_full(self, name: str) -> bool:
        """Whether this caller gets no more, unless others lose theirs."""
        return self.used >= self._limit or self._by_name[name] >= most_of(self._limit)

    def make_room(self, holding: Holding, amount: int) -> None:
        """Let those lose what they hold who are due, until there is room. Raises Full.

        A request alone of its caller may exceed the caller's part.
        """
        while True:
            others = self._by_name[holding.name] - holding.held
            is_over = bool(others) and self._by_name[holding.name] + amount > most_of(self._limit)
            if not is_over and self.used + amount <= self._limit:
                return
            victim = self._loser(holding, holding.name if is_over else None)
            if victim is None:
                raise Full
            victim.lose()

    def count(self, holding: Holding, amount: int) -> None:
        """Count what a holding took, or gave if negative."""
        self.used += amount
        self._by_name[holding.name] += amount
        if not self._by_name[holding.name]:
            del self._by_name[holding.name]

    def drain(self) -> None:
        """From now on, blocks in which something may be lost end when they are due."""
        self.is_draining = True
        for holding in self._holdings:
            holding._hurry()  # noqa: SLF001  # one class in two

    def _loser(self, taking: Holding, name: str | None) -> Holding | None:
        """Whoever is due, first of the caller that holds the most."""
        now = asyncio.get_running_loop().time()
        due = (
            each
            for each in self._holdings
            if each is not taking and each.held and each.due <= now and name in (None, each.name)
        )
        return max(due, key=lambda each: (self._by_name[each.name], -each.due), default=None)


class Turn:
    """The right to work, until it ends."""

    def __init__(self, turns: "Turns", caller: Caller) -> None:
        self.caller = caller
        self.began = asyncio.get_running_loop().time()
        self._turns = turns

    def end(self) -> None:
        """Call once."""
        self._turns.end(self)


class Turns:
    """Some turns at a time. The next goes to the caller that has worked for the shortest time, then to its request."""

    def __init__(self, most: int) -> None:
        self._free = most
        self._most = most if most == 1 else min(most_of(most), most - 1)
        self._running: Counter[str | Caller] = Counter()
        self._waiting: dict[Caller, deque[asyncio.Future[Turn]]] = {}
        self._open: Counter[Caller] = Counter()
        """Turns of each request that wait or run."""
        self._worked: dict[str | Caller, float] = {}
        """Seconds of callers and requests that have turns; one that is new begins with the least of its kind."""

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
        self._enter(caller)
        granted: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append(granted)
        self._grant()
        try:
            return await granted
        except BaseException:
            if granted.done() and not granted.cancelled():
                granted.result().end()
            else:
                self._withdraw(caller, granted)
            raise

    def end(self, turn: Turn) -> None:
        """End a turn; its time counts for the caller and the request."""
        seconds = asyncio.get_running_loop().time() - turn.began
        self._worked[turn.caller] += seconds
        self._worked[turn.caller.name] += seconds
        self._running[turn.caller.name] -= 1
        self._running[turn.caller] -= 1
        self._free += 1
        self._leave(turn.caller)
        self._grant()

    def _withdraw(self, caller: Caller, granted: asyncio.Future[Turn]) -> None:
        queue = self._waiting.get(caller, deque())
        if granted in queue:
            queue.remove(granted)
            if not queue:
                del self._waiting[caller]
        self._leave(caller)

    def _grant(self) -> None:
        while self._free and (caller := self._next()):
            queue = self._waiting[caller]
            granted = queue.popleft()
            if not queue:
                del self._waiting[caller]
            if not granted.cancelled():
                self._free -= 1
                self._running[caller.name] += 1
                self._running[caller] += 1
                granted.set_result(Turn(self, caller))

    def _next(self) -> Caller | None:
        eligible = (each for each in self._waiting if self._running[each.name] < self._most)
        return min(
            eligible,
            key=lambda each: (
                (self._worked[each.name], self._running[each.name]),
                (self._worked[each], self._running[each]),
            ),
            default=None,
        )

    def _enter(self, caller: Caller) -> None:
        if caller.name not in self._worked:
            self._worked[caller.name] = self._least(each for each in self._worked if isinstance(each, str))
        if caller not in self._worked:
            requests = (each for each in self._open if each.name == caller.name)
            self._worked[caller] = self._least(requests)
        self._open[caller] += 1

    def _least(self, keys: "Iterable[str | Caller]") -> float:
        return min((self._worked[each] for each in keys), default=0.0)

    def _leave(self, caller: Caller) -> None:
        self._open[caller] -= 1
        if not self._open[caller]:
            del self._open[caller], self._worked[caller]
            self._running.pop(caller, None)
            if not any(each.name == caller.name for each in self._open):
                self._worked.pop(caller.name, None)
                self._running.pop(caller.name, None)
