"""SGLang's encoder protocol over HTTP."""

import json

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vitwire.shared.fairness.budgets import Budget
from vitwire.shared.fairness.hosts import host_name
from vitwire_gateway.api_errors import ApiError, released
from vitwire_gateway.bodies import read_body
from vitwire_gateway.callers import Caller
from vitwire_gateway.gateway_settings import SglangSettings
from vitwire_gateway.sglang.adapter import Adapter
from vitwire_gateway.sglang.receiver_requests import Kind, read
from vitwire_gateway.workers import Workers

_BODY_SECONDS = 60.0


def http_app(adapter: Adapter, workers: Workers, bodies: Budget, settings: SglangSettings) -> Starlette:
    """The ASGI application; `bodies` counts the bytes of bodies until their requests end."""

    async def health(_: Request) -> Response:
        return Response(status_code=200 if await adapter.is_healthy() else 503)

    def post(path: str, kind: Kind) -> Route:
        async def endpoint(request: Request) -> Response:
            caller = Caller.of(host_name(request.client.host) if request.client else "")
            req_id = None
            try:
                async with bodies.holding(caller.name) as holding:
                    body = await read_body(request, holding, settings, _BODY_SECONDS)
                    posted = await read(workers, caller, body, kind)
                    del body
                    req_id = posted.req_id
                    await adapter.serve(posted, caller, holding)
            except ApiError as error:
                released(error)
                # As SGLang's encoder reports it, in ASCII, as JSON strings can be invalid Unicode.
                answer = {"status": "error", "message": str(error), "req_id": req_id}
                return Response(json.dumps(answer), error.status, media_type="application/json")
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
