"""The metrics port: `/metrics` for Prometheus, `/healthz` and `/livez` for probes.

Runs on a separate event loop and thread, so that it answers while the server's event loop is busy or the engine
hangs. The number of connections is bounded, and none takes a thread.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from threading import Thread
from typing import NamedTuple, cast

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder

from vitwire_server.core.health import Health

_SECONDS = 10.0
"""Time after which a connection is closed, whatever its state."""
_HEADER_BYTES = 16 << 10
_TOO_LARGE = b"HTTP/1.0 431 Request Header Fields Too Large\r\nContent-Length: 0\r\n\r\n"
_TEXT = "text/plain; charset=utf-8"


class Response(NamedTuple):
    """The response of a path."""

    status: HTTPStatus
    content_type: str
    body: bytes


Routes = Mapping[str, Callable[[str], Response]]
"""Handlers by path; the argument is the Accept header."""


def _routes(registry: CollectorRegistry, health: Health) -> Routes:
    return {
        "/metrics": lambda accept: Response(HTTPStatus.OK, *_exposition(registry, accept)),
        "/healthz": lambda _: _probe(health.is_ready, "not ready"),
        "/livez": lambda _: _probe(health.is_alive, "not alive"),
    }


def _probe(ok: bool, otherwise: str) -> Response:
    status = HTTPStatus.OK if ok else HTTPStatus.SERVICE_UNAVAILABLE
    return Response(status, _TEXT, b"ok\n" if ok else f"{otherwise}\n".encode())


def _exposition(registry: CollectorRegistry, accept: str) -> tuple[str, bytes]:
    """Content type and body, in the format that `accept` asks for, else in plain text."""
    try:
        encode, content_type = choose_encoder(accept)
        return content_type, encode(registry)
    except (TypeError, ValueError):
        return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(registry)


class _Exchange(BaseHTTPRequestHandler):
    """One request and its response in memory, parsed and formatted by the standard library."""

    def __init__(self, routes: Routes, request: bytes) -> None:  # does not call the base class, which needs a socket
        self._routes = routes
        self.rfile = BytesIO(request)  # the base class only reads lines
        self.wfile = BytesIO()
        self.handle_one_request()

    @property
    def raw_response(self) -> bytes:
        """Status line, headers and body."""
        return cast("BytesIO", self.wfile).getvalue()

    def do_GET(self) -> None:
        route = self._routes.get(self.path.partition("?")[0])
        if route:
            self._respond(route(self.headers.get("Accept", "")))
        else:
            self._respond(Response(HTTPStatus.NOT_FOUND, _TEXT, f"{', '.join(self._routes)}\n".encode()))

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self._respond(Response(HTTPStatus.METHOD_NOT_ALLOWED, _TEXT, b"GET or HEAD\n"))

    do_PUT = do_PATCH = do_DELETE = do_POST  # noqa: N815  # the base class finds them by name

    def _respond(self, response: Response) -> None:
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        self.send_header("Content-Length", str(len(response.body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's signature
        """Do not log requests."""


class _Connection(asyncio.Protocol):
    """Answers one request and closes. `opened` has all connections, oldest first; at the limit the oldest is closed."""

    def __init__(self, routes: Routes, opened: dict["_Connection", asyncio.Transport], most: int) -> None:
        self._routes = routes
        self._opened = opened
        self._most = most
        self._request = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._end = asyncio.get_running_loop().call_later(_SECONDS, transport.abort)
        if len(self._opened) >= self._most:
            self._opened.pop(next(iter(self._opened))).abort()
        self._opened[self] = transport

    def data_received(self, data: bytes) -> None:
        """Answer once the header is complete; a body is not read."""
        self._request += data
        head = bytes(self._request[:_HEADER_BYTES])
        if b"\r\n\r\n" in head or b"\n\n" in head:
            self._finish(_Exchange(self._routes, head).raw_response)
        elif len(self._request) > _HEADER_BYTES:
            self._finish(_TOO_LARGE)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the base class's signature
        self._end.cancel()
        self._opened.pop(self, None)

    def _finish(self, response: bytes) -> None:
        self._transport.write(response)
        self._transport.close()


class MetricsServer:
    """Serves the metrics and the server's health over HTTP, on a separate thread."""

    def __init__(self, registry: CollectorRegistry, health: Health, host: str, port: int, max_connections: int) -> None:
        """Bind; raises OSError if the address is taken. Port 0 takes a free one.

        A connection beyond `max_connections` closes the oldest one, so that probes always get through.
        """
        self._routes = _routes(registry, health)
        is_v6 = ":" in host
        try:
            self._socket = socket.create_server(
                (host, port), family=socket.AF_INET6 if is_v6 else socket.AF_INET, dualstack_ipv6=is_v6
            )
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port}: {error}") from error
        self.port = int(self._socket.getsockname()[1])
        self._max_connections = max_connections
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = Thread(target=self._run, name="metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Close the port and wait for the thread to end, if it was started."""
        if self._thread.ident is None:
            self._socket.close()
            self._loop.close()
            return
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        opened: dict[_Connection, asyncio.Transport] = {}
        most = self._max_connections
        # asyncio accepts up to `backlog` connections per loop iteration, and reads a request three iterations later:
        # few others may be accepted in between, or they would close this connection.
        burst = max(1, most // 16)
        server = await self._loop.create_server(
            lambda: _Connection(self._routes, opened, most), sock=self._socket, backlog=burst
        )
        self._socket.listen(socket.SOMAXCONN)  # asyncio set a queue of `burst`
        await self._stopping.wait()
        server.close()
        for transport in opened.values():
            transport.abort()
        await asyncio.sleep(0)  # let aborted connections close
