"""Connections of callers: uvicorn's, with errors in OpenAI's form and without callers that waste time.

These never read, or send bodies in tiny chunks, each of which costs as much as a large one.
"""

import asyncio
import math
import os
import socket
from typing import Any

import h11
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitwire_children.spawn import LISTENER
from vitwire_gateway.api_errors import ApiError

_MALFORMED = ApiError(400, "the request is not valid HTTP/1.1", "invalid_http", headers={"connection": "close"})

_BACKLOG = 2048
_FREE_CHUNKS, _CHUNK_BYTES = 256, 256
"""After the free chunks, the chunks of a body must have this many bytes on average."""


class Parser(h11.Connection):
    """Refuses bodies in tiny chunks."""

    _chunks = _bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA | h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += 1
            self._bytes += len(event.data)
            if self._chunks > _FREE_CHUNKS + self._bytes // _CHUNK_BYTES:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        return event


def limited_to(stall_seconds: float) -> type[H11Protocol]:
    """The class of connections that end when the caller takes nothing for this long."""

    class Connection(H11Protocol):
        def __init__(self, config: Config, *args: Any, **named: Any) -> None:  # noqa: ANN401  # as the base
            super().__init__(config, *args, **named)
            self.conn = Parser(h11.SERVER, self.conn._max_incomplete_event_size)  # noqa: SLF001  # set by the base

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the base
            super().connection_made(transport)
            found = transport.get_extra_info("socket")
            if found is None or found.family == socket.AF_UNIX:
                return
            # Without it, a piece of a response waits until the caller acknowledges the one before, which takes 40 ms.
            # asyncio sets it only on sockets whose `proto` is TCP; those that `create_server` accepts have 0.
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Closing waits until all is sent, which for such a caller only the kernel ends. Linux has the option.
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(stall_seconds * 1000)))

        def send_400_response(self, msg: str) -> None:  # noqa: ARG002  # the base's signature
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                headers = {"content-type": "application/json", **_MALFORMED.headers}
                for event in (
                    h11.Response(status_code=_MALFORMED.status, headers=list(headers.items()), reason=b"Bad Request"),
                    h11.Data(data=_MALFORMED.body),
                    h11.EndOfMessage(),
                ):
                    self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

    return Connection


def configured(app: ASGIApp, stall_seconds: float, drain_seconds: float, **options: Any) -> Config:  # noqa: ANN401
    """uvicorn's configuration for callers whose connections are `limited_to`, and whose requests end in time."""
    return Config(
        app,
        loop="asyncio",  # gRPC's asyncio is made for it
        http=limited_to(stall_seconds),
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(drain_seconds),
        **options,
    )


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens: the one that was inherited, or a new one. Raises OSError with the flags of that."""
    if descriptor := os.environ.pop(LISTENER, ""):
        return socket.socket(fileno=int(descriptor))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(f"--host {host} --port {port}: cannot listen: {error.strerror}") from error
