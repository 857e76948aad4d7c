"""Images that the encoder stores for one request, which goes on as soon as they are accepted."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Self

from vitwire import Model


@dataclass(frozen=True, slots=True)
class Referenced:
    """The id and the grid by which an engine asks for an image's embedding."""

    content_id: str
    grid: tuple[int, int, int]
    model: Model


class Stores:
    """Tasks by digest of the image. The block ends with the last of them, and cancels them if it fails."""

    def __init__(self) -> None:
        self._tasks: dict[bytes, asyncio.Task[str]] = {}

    async def begin(
        self, digest: bytes, work: Callable[[Callable[[Referenced], None]], Coroutine[None, None, str]]
    ) -> Referenced:
        """What the work accepted first; the work goes on. Raises its error if it ends before."""
        accepted: asyncio.Future[Referenced] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(work(lambda found: None if accepted.done() else accepted.set_result(found)))
        self._tasks[digest] = task
        await asyncio.wait((task, accepted), return_when=asyncio.FIRST_COMPLETED)
        if not accepted.done():
            await task
        return accepted.result()

    async def ended(self, digest: bytes) -> str | None:
        """What the work on an image returned, once it has ended; None if there is none. Raises its error."""
        task = self._tasks.get(digest)
        return await task if task else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for task in self._tasks.values() if kind else ():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
