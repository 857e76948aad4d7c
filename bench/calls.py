"""Calls of a benchmark's client process: what each sends, how many at once, and what came of them."""

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
_FOREVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Work:
    """What each call sends: `images` images of one size, of `distinct` requests in turn."""

    side: int = 0
    """Of square images."""
    size: str = ""
    """A name of `images.SIZES`, instead of a side."""
    pixels: str = "uint8"
    """Of `images.PIXELS`."""
    images: int = 1
    distinct: int = 4
    answer: Sequence[int] = ()
    """Sizes of the messages to ask of a bare server; empty for a service."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How many calls, and how fast."""

    in_flight: int = 1
    calls: int = _FOREVER
    stop: float = float("inf")
    """No call starts after this time."""
    pause: float = 0.0
    """Seconds between a call's end and the next one's start."""

    def numbers(self) -> Iterator[int]:
        """The calls to make; shared by all workers."""
        return iter(range(self.calls))

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.stop


@dataclass(slots=True)
class Done:
    """A call that ended: when, after how many seconds, and the code of its error, if any."""

    at: float
    seconds: float
    error: str = ""


class Driver(ABC):
    """Makes calls of one kind."""

    @abstractmethod
    def prepare(self, work: Work) -> Row:
        """Draw the images and make one call; returns the bytes and rows of a call."""

    @abstractmethod
    def run(self, pace: Pace) -> list[Done]:
        """Make calls; returns them all."""

    @abstractmethod
    def close(self) -> None:
        """Close connections."""


class Threads(Driver):
    """A thread for each call in flight."""

    @abstractmethod
    def call(self, number: int) -> str:
        """Make one call; returns the code of its error, or nothing."""

    def run(self, pace: Pace) -> list[Done]:
        done: list[Done] = []
        numbers = pace.numbers()

        def work() -> None:
            while not pace.is_over and (number := next(numbers, None)) is not None:
                start = time.monotonic()
                error = self.call(number)
                end = time.monotonic()
                done.append(Done(end, end - start, error))
                if pace.pause:
                    time.sleep(pace.pause)

        threads = [threading.Thread(target=work) for _ in range(pace.in_flight)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return done


class Tasks(Driver):
    """A task for each call in flight, on an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    @abstractmethod
    async def call(self, number: int) -> str:
        """Make one call; returns the code of its error, or nothing."""

    def run(self, pace: Pace) -> list[Done]:
        return self._loop.run_until_complete(self._run(pace))

    async def _run(self, pace: Pace) -> list[Done]:
        done: list[Done] = []
        numbers = pace.numbers()

        async def work() -> None:
            while not pace.is_over and (number := next(numbers, None)) is not None:
                start = time.monotonic()
                error = await self.call(number)
                end = time.monotonic()
                done.append(Done(end, end - start, error))
                if pace.pause:
                    await asyncio.sleep(pace.pause)

        await asyncio.gather(*(work() for _ in range(pace.in_flight)))
        return done
