"""Responses of RPCs: bounded in time if a client does not read, and announced by headers if they take long."""

import asyncio
import logging
from collections.abc import Awaitable
from types import TracebackType

from vitwire_server.core.errors import DeadlineExceeded
from vitwire_server.observe.metrics.rpc import RpcMetrics
from vitwire_server.rpc.grpc_types import Context, cancelled_if_gone
from vitwire_server.rpc.response_messages import Outgoing

_log = logging.getLogger(__name__)
_METADATA = "x-vitwire-acknowledge"
"""Metadata of a client that repeats calls by itself. Proxies repeat none whose headers they passed on."""
_SECONDS = 0.1
_SHARE = 0.1
"""Share of the time until the deadline; the client waits for a third of it."""


class PendingWrites:
    """Cancels a write that has not ended after `seconds`. Event loop only.

    All writes may take equally long, so the oldest one is due first, and one timer for it is enough: a timeout
    object per message costs more than everything else around a write.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
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
            self._timer = loop.call_later(self.seconds, self._review, loop)
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
            due = started + self.seconds
            if due > now:
                self._timer = loop.call_at(due, self._review, loop)
                return
            if task not in self._stalled:
                self._stalled.add(task)
                task.cancel()


class ResponseWriter:
    """Writes the responses of one RPC; a context manager around all that serves it.

    If none is written within a moment, it sends the headers to clients that take a longer silence for a frozen server.
    gRPC sends headers together with the first response; sent alone they cost as much as a small response.
    """

    def __init__(self, context: Context, writes: PendingWrites, metrics: RpcMetrics) -> None:
        self._context = context
        self._writes = writes
        self._metrics = metrics
        self._timer: asyncio.TimerHandle | None = None
        self._headers: asyncio.Future[None] | None = None
        """While they are being sent alone."""

    async def __aenter__(self) -> "ResponseWriter":
        context = self._context
        if any(key == _METADATA for key, _ in context.invocation_metadata() or ()):
            remaining = context.time_remaining()
            seconds = _SECONDS if remaining is None else min(_SECONDS, max(0.0, remaining) * _SHARE)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._send_headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer:
            self._timer.cancel()
        if kind is None or not issubclass(kind, asyncio.CancelledError):
            await self._settle_headers()  # before the status, which sends headers too

    async def write(self, message: Outgoing) -> None:
        """Send a message. Raises CancelledError if the client is gone, DeadlineExceeded if it does not read."""
        await self._settle_headers()
        try:
            with cancelled_if_gone("its response was written"):
                await self._writes.complete(self._context.write(message.raw))
            self._metrics.delivered(message.rows_bytes)
        except TimeoutError:
            raise DeadlineExceeded(f"the client did not read the response for {self._writes.seconds:g} s") from None

    async def _settle_headers(self) -> None:
        """Send no headers from now on; wait for those that are being sent."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._headers:
            await asyncio.wait([self._headers])
            self._headers = None

    def _send_headers(self) -> None:
        self._headers = asyncio.ensure_future(self._context.send_initial_metadata(()))
        self._headers.add_done_callback(_log_failure)


def _log_failure(sending: asyncio.Future[None]) -> None:
    """A client that left is noticed where its messages are read and written."""
    if not sending.cancelled() and (error := sending.exception()):
        _log.debug("a client left while its call was acknowledged: %r", error)
