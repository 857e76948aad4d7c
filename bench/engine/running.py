"""Generations of text that run while an engine has other work."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

from bench.engine.answers import Answer
from bench.engine.requests import Asked
from bench.engine.vllm_engine import answered
from bench.engine.ways import Text

_COUNT = 4
_TOKENS = 64
"""Of each generation; the next one follows at once."""


@asynccontextmanager
async def running(texts: Sequence[Text], asked: Sequence[Asked], names: Iterator[str]) -> AsyncIterator[list[Answer]]:
    """Four at a time; yields a list that has the answers after the block."""
    answers: list[Answer] = []
    over = asyncio.Event()

    async def generate(number: int) -> None:
        text, each = texts[number % len(texts)], asked[number % len(asked)]
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
