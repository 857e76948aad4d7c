"""Reading items ahead of their results, for asyncio. `ahead.py` is the same for threads."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import aclosing
from itertools import islice

from vitwire._delivery.answers import Result
from vitwire._transport.ahead import Group, Window
from vitwire.items import Item

Items = Iterable[Item] | AsyncIterable[Item]


class AsyncAhead:
    """Encodes the items of an iterable, which a task reads ahead."""

    def __init__(self, items: Items, encode: Callable[[Group], AsyncGenerator[Result, None]]) -> None:
        """`encode` gives the results of one request."""
        self._items = items
        self._encode = encode
        self._arrived: asyncio.Queue[Result | Exception | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopped = False
        self._taken = asyncio.Event()
        self._window = Window(self._start)

    async def results(self) -> AsyncGenerator[Result, None]:
        """Results as they arrive. Closing the generator cancels the requests in flight."""
        reader = asyncio.create_task(self._read())
        try:
            while not self._window.is_complete:
                result = await self._arrived.get()
                if isinstance(result, Exception):
                    raise result
                if result is not None:
                    self._window.taken(result[0])
                    self._taken.set()
                    yield result
        finally:
            self._is_stopped = True
            tasks = [reader, *self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self) -> None:
        try:
            async for item in _each(self._items):
                self._window.add(item)
                while not self._window.has_room:
                    self._taken.clear()
                    await self._taken.wait()
            self._window.end()
            self._arrived.put_nowait(None)
        except Exception as error:  # noqa: BLE001  # raised again by the caller
            self._arrived.put_nowait(error)

    def _start(self, group: Group) -> None:
        task = asyncio.create_task(self._request(group))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _request(self, group: Group) -> None:
        try:
            async with aclosing(self._encode(group)) as results:
                async for result in results:
                    self._arrived.put_nowait(result)
        except Exception as error:  # noqa: BLE001  # as above
            self._arrived.put_nowait(error)
        finally:
            if not self._is_stopped:
                self._window.request_ended()


async def _each(items: Items) -> AsyncIterator[Item]:
    """The items; an iterable that is not asynchronous may block, so it is read in threads."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
        return
    iterator = iter(items)

    def following() -> list[Item]:
        return list(islice(iterator, 1))

    while found := await asyncio.to_thread(following):
        yield found[0]
