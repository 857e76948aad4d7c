"""Calls to the encoder, which items of one request may share, and so its forwards."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import NamedTuple

from vitwire import AsyncClient, Embedding, Item


class _Asked(NamedTuple):
    """An item, and who waits for its embedding."""

    item: Item
    answer: "asyncio.Future[Embedding]"


class Batches:
    """Sends items that are read together in one call, once none of them is being read; any other item at once.

    A call is cancelled when nobody waits for its answers any more.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._reading = 0
        self._asked: list[_Asked] = []
        self._calls: set[asyncio.Task[None]] = set()

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block in which an item is read and added, for which others that were added wait."""
        self._reading += 1
        try:
            yield
        finally:
            self._reading -= 1
            if not self._reading:
                self._send()

    def add(self, item: Item) -> "asyncio.Future[Embedding]":
        """The embedding of an item, once it is there. It may raise VitwireError."""
        answer: asyncio.Future[Embedding] = asyncio.get_running_loop().create_future()
        self._asked.append(_Asked(item, answer))
        if not self._reading:
            self._send()
        return answer

    def _send(self) -> None:
        asked, self._asked = [each for each in self._asked if not each.answer.done()], []
        if not asked:
            return
        call = asyncio.create_task(self._call(asked))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

        def end(_: object) -> None:
            if all(each.answer.done() for each in asked) and any(each.answer.cancelled() for each in asked):
                call.cancel()

        for each in asked:
            each.answer.add_done_callback(end)

    async def _call(self, asked: Sequence[_Asked]) -> None:
        items = [each.item for each in asked]
        try:
            if len(items) == 1:  # one message, which takes less time than a stream
                _settle(asked, *await self._client.encode(items))
                return
            async with aclosing(self._client.iter_encode(items, return_exceptions=True)) as results:
                async for index, result in results:
                    _settle([asked[index]], result)
        except Exception as error:  # noqa: BLE001  # raised by those who wait
            _settle(asked, error)
        finally:
            for each in asked:
                each.answer.cancel()  # has no effect on those that are there


def _settle(asked: Sequence[_Asked], result: Embedding | Exception) -> None:
    for _, answer in asked:
        if answer.done():  # its request has ended
            continue
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)
