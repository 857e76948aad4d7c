"""SGLang's encoder protocol over HTTP: its language servers speak this unless SGLANG_ENCODER_MM_RECEIVER_MODE=grpc."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vitwire.integrations.sglang.adapter import Adapter
from vitwire.integrations.sglang.parts import Refused, part_of_json, registration_of_json
from vitwire.router.errors import ApiError
from vitwire.router.rewriting import parse

Work = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Bytes of a request's body, bytes of all bodies held at a time, and seconds for a body to arrive."""

    each: int = 64 << 20
    together: int = 2 << 30
    seconds: float = 60.0


_MOONCAKE = (
    "this encoder sends embeddings over ZMQ only: start SGLang with --encoder-transfer-backend zmq_to_scheduler "
    "or zmq_to_tokenizer"
)


class _Bodies:
    """Reads bodies of requests; each is counted as held until its request ends."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._held = 0

    @asynccontextmanager
    async def json(self, request: Request) -> AsyncGenerator[dict[str, Any], None]:
        """The JSON object in the body. Raises Refused."""
        content = bytearray()
        try:
            await self._read(request, content)
            yield _object(content)
        finally:
            self._held -= len(content)

    async def _read(self, request: Request, content: bytearray) -> None:
        try:
            async with asyncio.timeout(self._limits.seconds):
                async for chunk in request.stream():
                    self._held += len(chunk)
                    content += chunk
                    self._check(len(content))
        except TimeoutError as error:
            message = f"the body took longer than {self._limits.seconds:g} s"
            raise Refused(message, HTTPStatus.REQUEST_TIMEOUT) from error

    def _check(self, length: int) -> None:
        if length > self._limits.each:
            message = f"the body exceeds the limit of {self._limits.each} bytes"
            raise Refused(message, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        if self._held > self._limits.together:
            raise Refused("the requests in flight are too large together", HTTPStatus.SERVICE_UNAVAILABLE)


def http_app(adapter: Adapter, limits: BodyLimits) -> Starlette:
    """The ASGI application."""
    bodies = _Bodies(limits)

    async def encode(body: dict[str, Any]) -> None:
        await adapter.encode(part_of_json(body))

    async def register(body: dict[str, Any]) -> None:
        adapter.register(registration_of_json(body))

    async def refuse(_: dict[str, Any]) -> None:
        raise Refused(_MOONCAKE, HTTPStatus.NOT_IMPLEMENTED)

    async def health(_: Request) -> Response:
        return Response(status_code=200 if await adapter.is_healthy() else 503)

    def post(path: str, work: Work) -> Route:
        async def endpoint(request: Request) -> Response:
            req_id: object = None
            try:
                async with bodies.json(request) as body:
                    req_id = body.get("req_id")
                    await work(body)
            except Refused as error:
                return _failure(error, req_id)
            except ClientDisconnect:
                return Response(status_code=499)
            return JSONResponse(None)

        return Route(path, endpoint, methods=["POST"])

    return Starlette(
        routes=[
            post("/encode", encode),
            post("/scheduler_receive_url", register),
            post("/scheduler_receive_meta_data", refuse),
            post("/send", refuse),
            Route("/health", health),
            Route("/health_generate", health),
        ]
    )


def _object(content: bytes | bytearray) -> dict[str, Any]:
    try:
        return parse(content)
    except ApiError as error:
        raise Refused(error.message, HTTPStatus(error.status)) from error


def _failure(error: Refused, req_id: object) -> Response:
    """An error as SGLang's encoder reports it, in ASCII, as JSON strings can be invalid Unicode."""
    known = req_id if isinstance(req_id, str) else None
    body = json.dumps({"status": "error", "message": str(error), "req_id": known})
    return Response(body, error.status, media_type="application/json")
