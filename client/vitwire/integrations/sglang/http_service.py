"""SGLang's encoder protocol over HTTP: its language servers speak this unless SGLANG_ENCODER_MM_RECEIVER_MODE=grpc."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vitwire.integrations.sglang.adapter import Adapter
from vitwire.integrations.sglang.parts import Refused, part_of_json, registration_of_json

Work = Callable[[dict[str, Any]], Awaitable[None]]

_MOONCAKE = (
    "this encoder sends embeddings over ZMQ only: start SGLang with --encoder-transfer-backend zmq_to_scheduler "
    "or zmq_to_tokenizer"
)


def http_app(adapter: Adapter, *, max_body_bytes: int, body_seconds: float) -> Starlette:
    """The ASGI application."""

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
            body: dict[str, Any] = {}
            try:
                body = await _body(request, max_body_bytes, body_seconds)
                await work(body)
            except Refused as error:
                return _failure(error, body.get("req_id"))
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


async def _body(request: Request, max_bytes: int, seconds: float) -> dict[str, Any]:
    """The JSON object in the request's body. Raises Refused."""
    content = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                content += chunk
                if len(content) > max_bytes:
                    message = f"the body exceeds the limit of {max_bytes} bytes"
                    raise Refused(message, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    except TimeoutError as error:
        raise Refused(f"the body took longer than {seconds:g} s", HTTPStatus.REQUEST_TIMEOUT) from error
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise Refused("the body is not JSON") from error
    if not isinstance(body, dict):
        raise Refused(f"expected a JSON object, got {type(body).__name__}")
    return body


def _failure(error: Refused, req_id: object) -> JSONResponse:
    """An error as SGLang's encoder reports it."""
    known = req_id if isinstance(req_id, str) else None
    return JSONResponse({"status": "error", "message": str(error), "req_id": known}, error.status)
