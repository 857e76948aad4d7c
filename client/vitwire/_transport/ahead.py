"""Reading items ahead of their results, so that later items upload while earlier ones are yielded."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import aclosing
from itertools import islice

from vitwire._delivery.answers import Result
from vitwire._transport.arrivals import Arrivals, AsyncArrivals
from vitwire._transport.calls import Calls
from vitwire._transport.protocol import ONE_MESSAGE_BYTES
from vitwire.embeddings import RowGroup
from vitwire.items import Item, checked, pixel_bytes

Items = Iterable[Item] | AsyncIterable[Item]
Group = dict[int, Item]
"""Items of one request, by position."""

AHEAD_ITEMS = 64
AHEAD_BYTES = 128 << 20
"""Limits of what is read, but whose results are not yet taken; one item is always allowed."""
_REQUESTS = 8
"""Maximum requests in flight. Items that are read meanwhile go together in the next one."""
_GROUP_ITEMS = 16


class Window:
    """The items that are read and whose results are not yet taken, and the requests to send them in. Thread-safe."""

    def __init__(self, start: Callable[[Group], object]) -> None:
        """`start` begins a request, which calls `request_ended` when it is over."""
        self._start = start
        self._lock = threading.RLock()
        self._unsent: deque[tuple[int, Item]] = deque()
        self._held: dict[int, int] = {}
        """Bytes of each item."""
        self._held_bytes = 0
        self._count = 0
        self._requests = 0
        self._is_read = False

    def add(self, item: Item) -> None:
        """Take the next item. Raises InvalidItem for anything else."""
        with self._lock:
            self._unsent.append((self._count, checked(item, self._count)))
            self._held[self._count] = pixel_bytes(item)
            self._held_bytes += self._held[self._count]
            self._count += 1
            self._send()

    def end(self) -> None:
        """There are no more items."""
        self._is_read = True

    def request_ended(self) -> None:
        """A request is over; the next one may start."""
        with self._lock:
            self._requests -= 1
            self._send()

    def taken(self, index: int, result: object = None) -> None:
        """The caller took the result of this item, or some of its rows."""
        with self._lock:
            if not isinstance(result, RowGroup):
                self._held_bytes -= self._held.pop(index)

    @property
    def has_room(self) -> bool:
        """Whether to read another item."""
        with self._lock:
            return not self._held or (len(self._held) < AHEAD_ITEMS and self._held_bytes < AHEAD_BYTES)

    @property
    def is_complete(self) -> bool:
        """Whether all items are read and their results taken."""
        with self._lock:
            return self._is_read and not self._held

    def _send(self) -> None:
        while self._unsent and self._requests < _REQUESTS:
            self._requests += 1
            self._start(self._group())

    def _group(self) -> Group:
        """The next items that fit in one message, at least one."""
        index, item = self._unsent.popleft()
        group, nbytes = {index: item}, self._held[index]
        while self._unsent and len(group) < _GROUP_ITEMS:
            index, item = self._unsent[0]
            nbytes += self._held[index]
            if nbytes > ONE_MESSAGE_BYTES:
                break
            group[index] = item
            self._unsent.popleft()
        return group


class Ahead:
    """Encodes the items of an iterable, which a thread reads ahead."""

    def __init__(self, items: Iterable[Item], encode: Callable[[Group, Calls], Iterator[Result]]) -> None:
        """`encode` gives the results of one request."""
        self._items = items
        self._encode = encode
        self._arrivals = Arrivals[Result]()
        self._calls: set[Calls] = set()
        self._stopped = threading.Event()
        self._taken = threading.Semaphore(0)
        self._window = Window(lambda group: self._arrivals.start(self._request(group)))

    def results(self) -> Generator[Result, None, None]:
        """Results as they arrive. Closing the generator cancels the requests in flight."""
        self._arrivals.start(self._read())
        try:
            while not self._window.is_complete:
                if (result := self._arrivals.next()) is not None:
                    self._window.taken(*result)
                    self._taken.release()
                    yield result
        finally:
            self._stopped.set()
            self._taken.release()
            for calls in tuple(self._calls):
                calls.cancel()

    def _read(self) -> Iterator[None]:
        for item in self._items:
            if self._stopped.is_set():
                return
            self._window.add(item)
            while not (self._window.has_room or self._stopped.is_set()):
                self._taken.acquire()
        self._window.end()
        yield  # a result of none, as the window may be complete now

    def _request(self, group: Group) -> Iterator[Result]:
        calls = Calls()
        self._calls.add(calls)
        if self._stopped.is_set():
            calls.cancel()
        try:
            yield from self._encode(group, calls)
        finally:
            self._calls.discard(calls)
            if not self._stopped.is_set():
                self._window.request_ended()


class AsyncAhead:
    """Encodes the items of an iterable, which a task reads ahead."""

    def __init__(self, items: Items, encode: Callable[[Group], AsyncGenerator[Result, None]]) -> None:
        """`encode` gives the results of one request."""
        self._items = items
        self._encode = encode
        self._arrivals = AsyncArrivals[Result]()
        self._is_stopped = False
        self._taken = asyncio.Event()
        self._window = Window(lambda group: self._arrivals.start(self._request(group)))

    async def results(self) -> AsyncGenerator[Result, None]:
        """Results as they arrive. Closing the generator cancels the requests in flight."""
        self._arrivals.start(self._read())
        try:
            while not self._window.is_complete:
                if (result := await self._arrivals.next()) is not None:
                    self._window.taken(*result)
                    self._taken.set()
                    yield result
        finally:
            self._is_stopped = True
            await self._arrivals.close()

    async def _read(self) -> AsyncGenerator[None, None]:
        async for item in _each(self._items):
            self._window.add(item)
            while not self._window.has_room:
                self._taken.clear()
                await self._taken.wait()
        self._window.end()
        yield  # as above

    async def _request(self, group: Group) -> AsyncGenerator[Result, None]:
        try:
            async with aclosing(self._encode(group)) as results:
                async for result in results:
                    yield result
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
    while found := await asyncio.to_thread(lambda: list(islice(iterator, 1))):
        yield found[0]
