"""SGLang's encoder protocol over HTTP: its language servers speak this unless SGLANG_ENCODER_MM_RECEIVER_MODE=grpc."""

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vitwire_gateway.openai.bodies import read_body
from vitwire_gateway.openai.errors import ApiError
from vitwire_gateway.openai.shares import Budget, Caller, Full, Holding, host_name
from vitwire_gateway.openai.workers import Workers
from vitwire_gateway.sglang.adapter import Adapter
from vitwire_gateway.sglang.parts import Refused
from vitwire_gateway.sglang.reading import Kind, read


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


def http_app(adapter: Adapter, workers: Workers, bodies: Budget, limits: BodyLimits) -> Starlette:
    """The ASGI application; `bodies` counts the bytes of bodies until their requests end."""

    async def health(_: Request) -> Response:
        return Response(status_code=200 if await adapter.is_healthy() else 503)

    def post(path: str, kind: Kind) -> Route:
        async def endpoint(request: Request) -> Response:
            caller = Caller.of(host_name(request.client.host) if request.client else "")
            req_id = None
            try:
                async with bodies.holding(caller.name) as holding:
                    body = await _body(request, holding, limits)
                    posted = await read(workers, caller, body, "json", kind)
                    del body
                    req_id = posted.req_id
                    if posted.refusal:
                        raise posted.refusal
                    if posted.part:
                        await adapter.encode(posted.part, caller, holding)
                    elif posted.registration:
                        adapter.register(posted.registration, caller)
                    else:
                        raise Refused(_MOONCAKE, HTTPStatus.NOT_IMPLEMENTED)
            except Refused as error:
                return _failure(error, req_id)
            except ClientDisconnect:
                return Response(status_code=499)
            return JSONResponse(None)

        return Route(path, endpoint, methods=["POST"])

    return Starlette(
        routes=[
            post("/encode", "part"),
            post("/scheduler_receive_url", "registration"),
            post("/scheduler_receive_meta_data", "other"),
            post("/send", "other"),
            Route("/health", health),
            Route("/health_generate", health),
        ]
    )


async def _body(request: Request, holding: Holding, limits: BodyLimits) -> bytes:
    try:
        return await read_body(request, holding, holding.take, limits.each, limits.seconds)
    except ApiError as error:
        raise Refused(error.message, HTTPStatus(error.status)) from error
    except Full:
        message = "the requests in flight are too large together"
        raise Refused(message, HTTPStatus.SERVICE_UNAVAILABLE) from None


def _failure(error: Refused, req_id: str | None) -> Response:
    """An error as SGLang's encoder reports it, in ASCII, as JSON strings can be invalid Unicode."""
    body: dict[str, Any] = {"status": "error", "message": str(error), "req_id": req_id}
    return Response(json.dumps(body), error.status, media_type="application/json")
