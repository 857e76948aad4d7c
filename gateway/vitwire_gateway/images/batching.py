"""Items of one request that share calls to the encoder, and so its forwards."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Self

from vitwire import AsyncClient, Embedding, Item, VitwireError

Answers = dict[int, "asyncio.Future[Embedding]"]


class Batches:
    """Sends the items that are ready in one call, as soon as no other item of the request is being read.

    A context manager, which cancels the calls when it is left. seconds: time limit of each call; None for the client's.
    """

    def __init__(self, client: AsyncClient, seconds: float | None) -> None:
        self._client = client
        self._seconds = seconds
        self._reading = 0
        self._items: list[Item] = []
        self._answers: Answers = {}
        self._calls: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """An item is being read in the block, for which others wait."""
        self._reading += 1
        try:
            yield
        finally:
            self._reading -= 1
            if not self._reading and self._items:
                self._calls.add(asyncio.create_task(self._call(self._items, self._answers)))
                self._items, self._answers = [], {}

    def add(self, item: Item) -> "asyncio.Future[Embedding]":
        """The embedding of an item, once it is there: call it in the block of `reading`. It may raise VitwireError."""
        answer: asyncio.Future[Embedding] = asyncio.get_running_loop().create_future()
        self._answers[len(self._items)] = answer
        self._items.append(item)
        return answer

    async def _call(self, items: list[Item], answers: Answers) -> None:
        try:
            results = self._client.iter_encode(items, return_exceptions=True, timeout=self._seconds)
            async with aclosing(results):
                async for index, result in results:
                    _settle({index: answers[index]}, result)
        except VitwireError as error:
            _settle(answers, error)
        finally:
            for answer in answers.values():
                answer.cancel()  # has no effect on those that are there


def _settle(answers: Mapping[int, "asyncio.Future[Embedding]"], result: Embedding | VitwireError) -> None:
    for answer in answers.values():
        if answer.done():  # its request has ended
            continue
        if isinstance(result, VitwireError):
            answer.set_exception(result)
        else:
            answer.set_result(result)
