"""Response headers before the first response, for clients that take a longer silence for a frozen server."""

import asyncio
import logging
from types import TracebackType

from vitwire_server.rpc.grpc_types import Context

_log = logging.getLogger(__name__)
_METADATA = "x-vitwire-acknowledge"
"""Metadata of a client that repeats calls by itself. Proxies repeat none whose headers they passed on."""
_SECONDS = 0.1
_SHARE = 0.1
"""Share of the time until the deadline; the client waits for a third of it."""


class Acknowledgement:
    """Sends the headers of one RPC if no response was sent within a moment.

    gRPC sends headers together with the first response; sent alone they cost as much as a small response.
    A context manager around all that serves the RPC. Call `settle` before each response.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Future[None] | None = None

    async def __aenter__(self) -> "Acknowledgement":
        context = self._context
        if any(key == _METADATA for key, _ in context.invocation_metadata() or ()):
            remaining = context.time_remaining()
            seconds = _SECONDS if remaining is None else min(_SECONDS, max(0.0, remaining) * _SHARE)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._send)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer:
            self._timer.cancel()
        if kind is None or not issubclass(kind, asyncio.CancelledError):
            await self.settle()  # before the status, which sends headers too

    async def settle(self) -> None:
        """Send no headers from now on; wait for those that are being sent."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._sending:
            await asyncio.wait([self._sending])
            self._sending = None

    def _send(self) -> None:
        self._sending = asyncio.ensure_future(self._context.send_initial_metadata(()))
        self._sending.add_done_callback(_log_failure)


def _log_failure(sending: asyncio.Future[None]) -> None:
    """A client that left is noticed where its messages are read and written."""
    if not sending.cancelled() and (error := sending.exception()):
        _log.debug("a client left while its call was acknowledged: %r", error)
