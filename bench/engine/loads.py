"""Loads: closed loops (`c8`: 8 requests in flight) and Poisson arrivals (`p20`: 20 requests a second)."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Self, TypeVar

T = TypeVar("T")


class Size(NamedTuple):
    """Side of the square images, and images in each request; or a clip of that many frames."""

    side: int
    images: int = 1
    frames: int = 1
    """Of the clip that takes the place of the images; 1: none."""

    @property
    def is_kept(self) -> bool:
        """True if no processor resizes pictures of this size."""
        return self.side % 32 == 0 and self.side >= 128

    @classmethod
    def of(cls, text: str) -> Self:
        """SIDExIMAGES. Raises ValueError for anything else."""
        side, _, images = text.partition("x")
        if not side.isdecimal() or not (images or "1").isdecimal() or not int(side) or not int(images or 1):
            raise ValueError(f"a size is SIDE or SIDExIMAGES; got {text!r}")
        return cls(int(side), int(images or 1))

    def __str__(self) -> str:
        return f"{self.side}x{self.images}" if self.frames == 1 else f"{self.frames}x{self.side} clip"


@dataclass(frozen=True, slots=True)
class Load:
    """How requests arrive."""

    closed: bool
    amount: float
    """Requests in flight of a closed loop, else requests per second."""

    @classmethod
    def of(cls, text: str) -> Self:
        """cN or pN. Raises ValueError for anything else."""
        closed, fault = text[:1] == "c", f"a load is cN, N in flight, or pN, N requests per second; got {text!r}"
        if text[:1] not in ("c", "p"):
            raise ValueError(fault)
        try:
            amount = int(text[1:]) if closed else float(text[1:])
        except ValueError:
            raise ValueError(fault) from None
        if not 0 < amount < inf:
            raise ValueError(fault)
        return cls(closed, amount)

    def __str__(self) -> str:
        return f"{'c' if self.closed else 'p'}{self.amount:g}"


async def drive(load: Load, count: int, call: Callable[[int], Awaitable[T]], seed: int = 0) -> list[T]:
    """Make the calls 0 to `count` - 1; returns their results in this order. seed: of Poisson arrivals."""
    if not load.closed:
        return await _arrivals(load.amount, count, call, seed)
    results: dict[int, T] = {}
    numbers = iter(range(count))

    async def loop() -> None:
        for number in numbers:
            results[number] = await call(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(int(load.amount), count)):
            group.create_task(loop())
    return [results[number] for number in range(count)]


async def _arrivals(rate: float, count: int, call: Callable[[int], Awaitable[T]], seed: int) -> list[T]:
    """Calls at the times of a Poisson process, the same in every run."""
    clock, rng = asyncio.get_running_loop(), random.Random(seed)
    due, tasks = clock.time(), []

    async def one(number: int) -> T:
        return await call(number)

    async with asyncio.TaskGroup() as group:
        for number in range(count):
            due += rng.expovariate(rate)
            await asyncio.sleep(due - clock.time())
            tasks.append(group.create_task(one(number)))
    return [task.result() for task in tasks]
