"""What the router does with requests, once they are admitted."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from vitwire.router.admission import Ticket
from vitwire.router.errors import ApiError, invalid
from vitwire.router.exchange import Exchange
from vitwire.router.images import Images
from vitwire.router.metrics import Metrics
from vitwire.router.rewriting import images_of, parse, rewritten
from vitwire.router.settings import Settings
from vitwire.router.uploads import parse_form
from vitwire.router.upstream import Engine, forwarded

_PROXIED = ("/v1/", "/tokenize", "/detokenize", "/version", "/pooling", "/classify", "/score", "/rerank")
"""Paths that are passed on: the engine's API, not its administration."""
_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Router:
    """Answers chat requests and passes others on."""

    settings: Settings
    metrics: Metrics
    engine: Engine
    images: Images
    drops_authorization: bool
    """Whether the caller's key is for the router alone."""
    engine_key: str | None
    """Sent in place of the caller's key."""

    async def chat(self, exchange: Exchange, ticket: Ticket) -> None:
        """A chat completion: its images become embeddings."""
        if exchange.request.method != "POST":
            raise ApiError(405, "expected POST", "method_not_allowed", headers={"allow": "POST"})
        if exchange.request.headers.get("content-encoding", "identity") != "identity":
            raise ApiError(415, "a compressed body is not supported", "unsupported_encoding")
        body = await self._body(exchange, ticket)
        await exchange.unless_disconnected(self._chat(exchange, ticket, body))

    async def proxied(self, exchange: Exchange, ticket: Ticket) -> None:
        """Any other request: it and its response pass as they are."""
        path = exchange.request.scope["path"]
        if not path.startswith(_PROXIED) or any(part in (".", "..") for part in path.split("/")):
            raise ApiError(404, f"the router has no path {path}", "unknown_path")
        body = await self._body(exchange, ticket)
        await exchange.unless_disconnected(self._forward(exchange, body))

    async def _body(self, exchange: Exchange, ticket: Ticket) -> bytes:
        settings = self.settings
        with self._timed("receive"):
            return await exchange.body(ticket, settings.max_body_bytes, settings.body_seconds)

    async def _chat(self, exchange: Exchange, ticket: Ticket, body: bytes) -> None:
        exchange.stage = "images"
        limit = self.settings.max_images
        files: dict[str, bytes] = {}
        is_form = exchange.request.headers.get("content-type", "").lower().startswith("multipart/form-data")
        if is_form:
            body, files = await parse_form(exchange.request.headers, body, limit)
        request = parse(body)
        refs = images_of(request)
        if len(refs) > limit:
            raise invalid(f"the request has {len(refs)} images, the limit is {limit}", "messages", "too_many_images")
        exchange.images = len(refs)
        if refs:
            with self._timed("images"):
                parts = await self.images.parts(refs, files, ticket)
            body = await self.images.encoder.in_thread(lambda: rewritten(request, parts))
            ticket.hold(len(body))
        await self._forward(exchange, body, without=(b"content-type",), extra=[(b"content-type", _JSON.encode())])

    async def _forward(
        self,
        exchange: Exchange,
        body: bytes,
        *,
        without: tuple[bytes, ...] = (),
        extra: list[tuple[bytes, bytes]] | None = None,
    ) -> None:
        """Send the request to the engine, and its response to the caller."""
        exchange.stage = "engine"
        request = exchange.request
        if self.drops_authorization:
            without += (b"authorization",)
        headers = forwarded(request.headers.raw, without=(*without, b"x-request-id")) + (extra or [])
        headers.append((b"x-request-id", exchange.request_id.encode()))
        if self.engine_key:
            headers.append((b"authorization", f"Bearer {self.engine_key}".encode()))
        began = time.perf_counter()
        async with self.engine.send(request.method, exchange.target, headers, body) as response:
            self.metrics.seconds.labels("engine").observe(time.perf_counter() - began)
            await exchange.relay(response)

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.metrics.seconds.labels(stage).observe(time.perf_counter() - began)
