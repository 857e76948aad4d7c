"""Streams of requests by one route, and generations of text that run beside them."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import islice

from bench.engine.answers import Answer
from bench.engine.loads import Load, drive
from bench.engine.photos import Photos
from bench.engine.requests import Asked
from bench.engine.routes import Route, Text
from bench.engine.vllm_engine import answered

AnyRoute = Route | Photos
_COUNT = 4
_TOKENS = 64
"""Tokens of each generation; the next one follows at once."""


async def stream(
    route: AnyRoute, asked: Sequence[Asked], names: Iterator[str], load: Load, tokens: int
) -> list[Answer]:
    """Make the requests, each `tokens` long, once all are prepared; takes a name for each."""
    chosen = list(islice(names, len(asked)))
    prepared = (route.prepare(each, name) for each, name in zip(asked, chosen, strict=True))
    ready = list(await asyncio.gather(*prepared))

    async def call(number: int) -> Answer:
        one, ready[number] = ready[number], None
        return await route.answered(asked[number], one, chosen[number], tokens)

    return await drive(load, len(asked), call)


@asynccontextmanager
async def running(text: Text, asked: Sequence[Asked], names: Iterator[str]) -> AsyncIterator[list[Answer]]:
    """Four at a time; yields a list that has the answers after the block."""
    answers: list[Answer] = []
    over = asyncio.Event()

    async def generate(number: int) -> None:
        each = asked[number % len(asked)]
        while not over.is_set():
            ready = await text.render_text(each, length=32)
            answers.append(await answered(text, each, ready, next(names), _TOKENS))

    async with asyncio.TaskGroup() as group:
        for number in range(_COUNT):
            group.create_task(generate(number))
        try:
            yield answers
        finally:
            over.set()
