"""One request of a caller and the response to it, over ASGI, and the boundary of all requests."""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Literal, cast

import httpx2
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from vitwire_gateway.api_errors import ApiError, released
from vitwire_gateway.gateway_settings import RouterSettings
from vitwire_gateway.metrics import Metrics
from vitwire_gateway.router.admission import Admission, Ticket
from vitwire_gateway.router.llm_engine import Headers, from_transport, is_of_events, returned

logger = logging.getLogger("vitwire.router")

Stage = Literal["receive", "images", "engine", "response"]
RouteName = Literal["chat", "embeddings", "proxied"]

_MAX_REQUEST_ID = 128
_CHUNK_BYTES = 64 << 10
_UPSTREAMS = ("encoder", "engine")
"""Codes of their errors begin with their names."""
_TRACEPARENT = re.compile(r"[0-9a-f]{2}(-[0-9a-f]{2,32}){3}")


class Exchange:
    """Reads one request, and sends its response once."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, stall_seconds: float) -> None:
        self.request = Request(scope, receive, send)
        self.request_id = _request_id(self.request.headers.get("x-request-id", ""))
        self.stage: Stage = "receive"
        self.status = 0
        self.images = 0
        self.is_complete = False
        self._receive = receive
        self._send = send
        self._stall_seconds = stall_seconds

    @property
    def target(self) -> bytes:
        """Path and query as the caller sent them."""
        raw_path: bytes = self.request.scope["raw_path"]
        query: bytes = self.request.scope["query_string"]
        return raw_path + (b"?" + query if query else b"")

    @property
    def trace(self) -> dict[str, str]:
        """Metadata that joins the encoder's logs and traces to this request."""
        parent = self.request.headers.get("traceparent", "")
        return {"x-request-id": self.request_id} | ({"traceparent": parent} if _TRACEPARENT.fullmatch(parent) else {})

    def check_head(self, max_bytes: int) -> None:
        """Raises ApiError if path and headers are too long; the HTTP parser bounds only what arrives in pieces."""
        size = len(self.target) + sum(len(name) + len(value) for name, value in self.request.headers.raw)
        if size > max_bytes:
            raise ApiError(431, f"path and headers exceed the limit of {max_bytes} bytes", "headers_too_large")

    async def unless_disconnected(self, work: Coroutine[None, None, None]) -> None:
        """Do the work; cancel it and raise ClientDisconnect if the caller goes away. The body must have been read."""
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._disconnected())
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and not self.is_complete:
                raise ClientDisconnect
            await task
        finally:
            for each in (task, watch):
                each.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def refuse(self, error: ApiError) -> None:
        """Send an error. In a response that has begun, it becomes an event or, elsewhere, a broken connection."""
        if not self.status:
            headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
            await self.respond(error.status, headers, error.body)

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole response in JSON."""
        size = str(len(body)).encode()
        await self._start(status, [(b"content-type", b"application/json"), (b"content-length", size), *headers])
        await self._write(body, more=False)

    async def respond_in_chunks(
        self, pieces: Iterator[bytes], place: Callable[[], AbstractAsyncContextManager[object]]
    ) -> None:
        """Send JSON in chunks of 64 KiB, each of which is made in a `place`."""
        self.stage = "response"
        await self._start(200, [(b"content-type", b"application/json")])
        more = True
        while more:
            chunk = bytearray()
            async with place():
                while more and len(chunk) < _CHUNK_BYTES:
                    piece = next(pieces, None)
                    more = piece is not None
                    chunk += piece or b""
                await asyncio.sleep(0)  # whatever others wait for comes before the next chunk
            await self._write(bytes(chunk), more=more)

    async def relay(self, response: httpx2.Response) -> None:
        """Send the engine's response as it arrives; a stream of events that breaks off ends in one with the error."""
        self.stage = "response"
        await self._start(response.status_code, returned(response))
        is_stream = is_of_events(response)
        try:
            async for chunk in cast("httpx2.AsyncByteStream", response.stream):
                await self._write(chunk, more=True)
        except httpx2.TransportError as error:
            failure = from_transport(error)
            if "content-length" in response.headers or not is_stream:
                raise failure from error
            await self._write(b"\n\ndata: " + failure.body + b"\n\n", more=True)
        await self._write(b"", more=False)

    async def _start(self, status: int, headers: Headers) -> None:
        self.status = status
        message = {
            "type": "http.response.start",
            "status": status,
            "headers": [*headers, (b"x-request-id", self.request_id.encode())],
        }
        await self._send(message)

    async def _write(self, body: bytes, *, more: bool) -> None:
        try:
            async with asyncio.timeout(self._stall_seconds):
                self.is_complete = not more
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError as error:
            raise ClientDisconnect from error

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An ASGI application around one way to answer requests: admission, errors, metrics, and one line of log."""

    route: RouteName
    answer: Callable[[Exchange, Ticket], Awaitable[None]]
    settings: RouterSettings
    admission: Admission
    metrics: Metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, self.settings.stall_seconds)
        outcome = "done"
        began = time.perf_counter()
        try:
            exchange.check_head(self.settings.max_header_bytes)
            async with self.admission.admitted(exchange.request) as ticket:
                await self.answer(exchange, ticket)
        except ApiError as error:
            outcome = error.code
            upstream = error.code.partition("_")[0]
            if upstream in _UPSTREAMS:
                self.metrics.failures.labels(upstream, error.code).inc()
            released(error)
            await exchange.refuse(error)
        except ClientDisconnect:
            outcome = "client disconnected"
            self.metrics.cancelled.labels(exchange.stage).inc()
        except asyncio.CancelledError:  # the time to drain is over: the connection is closed by returning
            outcome = "cut off by shutdown"
        except Exception:
            outcome = "internal error"
            logger.exception("request %s failed", exchange.request_id)
            await exchange.refuse(ApiError(500, "the router failed; its log has the reason", "internal_error"))
        finally:
            self._ended(exchange, outcome, began)

    def _ended(self, exchange: Exchange, outcome: str, began: float) -> None:
        """Count and log the request."""
        self.metrics.answered(self.route, exchange.status)
        logger.info(
            "%s %s %s %d %s images=%d %.1f ms",
            exchange.request_id,
            exchange.request.method,
            exchange.request.scope["path"].encode("unicode_escape").decode(),
            exchange.status,
            outcome,
            exchange.images,
            (time.perf_counter() - began) * 1e3,
        )


def _request_id(given: str) -> str:
    """The caller's id if it is short and printable, else a new one."""
    usable = 0 < len(given) <= _MAX_REQUEST_ID and given.isascii() and given.isprintable()
    return given if usable else uuid.uuid4().hex
