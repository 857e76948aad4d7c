"""Bounds how long a client may leave a message unread, with one timer for all responses."""

import asyncio
from collections.abc import Awaitable


class PendingWrites:
    """Cancels a write that has not ended after `seconds`. Event loop only.

    All writes may take equally long, so the oldest one is due first, and one timer for it is enough: a timeout
    object per message costs more than everything else around a write.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._started: dict[asyncio.Task[object], float] = {}
        """Tasks with a write in progress, the oldest first."""
        self._stalled: set[asyncio.Task[object]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def complete(self, write: Awaitable[None]) -> None:
        """Wait for a write of the current task; it has one at a time. Raises TimeoutError if it stalls."""
        task = asyncio.current_task()
        assert task is not None, "coroutines run in tasks"
        loop = asyncio.get_running_loop()
        self._started[task] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._review, loop)
        try:
            await write
        except asyncio.CancelledError:
            if task in self._stalled and task.uncancel() == 0:  # else the RPC was cancelled as well
                raise TimeoutError from None
            raise
        finally:
            del self._started[task]
            self._stalled.discard(task)

    def _review(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancel the writes that are due; set the timer to the next."""
        self._timer = None
        now = loop.time()
        for task, started in self._started.items():
            due = started + self._seconds
            if due > now:
                self._timer = loop.call_at(due, self._review, loop)
                return
            if task not in self._stalled:
                self._stalled.add(task)
                task.cancel()
