"""A stream of requests over ways in turn; all that precedes a request is done before the stream starts."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Self

from bench.engine import loads
from bench.engine.answers import Answer
from bench.engine.loads import Load
from bench.engine.photos import Photos
from bench.engine.requests import Asked
from bench.engine.ways import Way

AnyWay = Way | Photos


@dataclass(slots=True)
class Stream:
    """Requests that have been prepared, each with its way and name."""

    turns: Sequence[AnyWay]
    asked: Sequence[Asked]
    names: Sequence[str]
    ready: list[Any]

    @classmethod
    async def prepare(cls, ways: Sequence[AnyWay], asked: Sequence[Asked], names: Iterator[str]) -> Self:
        """Takes a name for each request."""
        chosen = list(islice(names, len(asked)))
        turns = [ways[number % len(ways)] for number in range(len(asked))]
        prepared = zip(turns, asked, chosen, strict=True)
        ready = await asyncio.gather(*(way.prepare(each, name) for way, each, name in prepared))
        return cls(turns, asked, chosen, list(ready))

    async def drive(self, load: Load, tokens: int, seed: int = 0) -> list[Answer]:
        """Make the requests, each `tokens` long. seed: of Poisson arrivals."""

        async def call(number: int) -> Answer:
            one, self.ready[number] = self.ready[number], None
            return await self.turns[number].answered(self.asked[number], one, self.names[number], tokens)

        return await loads.drive(load, len(self.asked), call, seed)
