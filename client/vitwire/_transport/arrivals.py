"""Results of several threads or tasks, as they arrive."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Arrivals(Generic[T]):
    """Results of threads."""

    def __init__(self, put: Callable[[T | Exception | None], object] | None = None) -> None:
        """`put` takes results in place of `next`."""
        self._queue: SimpleQueue[T | Exception | None] = SimpleQueue()
        self._put = put or self._queue.put

    def start(self, results: Iterable[T | None]) -> None:
        """Iterate over these results in a thread."""
        threading.Thread(target=self._read, args=(results,), daemon=True).start()

    def next(self) -> T | None:
        """The next result; None also if a thread has ended. Raises the error of a thread."""
        result = self._queue.get()
        if isinstance(result, Exception):
            raise result
        return result

    def _read(self, results: Iterable[T | None]) -> None:
        try:
            for result in results:
                self._put(result)
            self._put(None)
        except Exception as error:  # noqa: BLE001  # raised again by `next`
            self._put(error)


class AsyncArrivals(Generic[T]):
    """Results of tasks and threads."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[T | BaseException | None] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, results: AsyncGenerator[T | None, None]) -> None:
        """Iterate over these results in a task."""
        task = self._loop.create_task(self._read(results))
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def start_thread(self, results: Iterable[T]) -> None:
        """Iterate over these results in a thread."""
        Arrivals[T](self._put_from_thread).start(results)

    async def next(self) -> T | None:
        """The next result; None also if a task or thread has ended. Raises the error of a task or thread."""
        result = await self._queue.get()
        if isinstance(result, BaseException):
            raise result
        return result

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, results: AsyncGenerator[T | None, None]) -> None:
        async with aclosing(results):
            async for result in results:
                self._queue.put_nowait(result)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._queue.put_nowait(task.exception())

    def _put_from_thread(self, result: T | Exception | None) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._queue.put_nowait, result)


def merged(streams: Sequence[Iterable[T]]) -> Iterator[T]:
    """Results of all streams as they arrive; the threads end with their streams, which the caller cancels."""
    arrivals, running = Arrivals[T](), len(streams)
    for stream in streams:
        arrivals.start(stream)
    while running:
        if (result := arrivals.next()) is None:
            running -= 1
        else:
            yield result


async def merged_async(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Results of all streams as they arrive."""
    arrivals, running = AsyncArrivals[T](), len(streams)
    for stream in streams:
        arrivals.start(stream)
    try:
        while running:
            if (result := await arrivals.next()) is None:
                running -= 1
            else:
                yield result
    finally:
        await arrivals.close()
