"""SGLang's encoder protocol over HTTP."""

import json
from collections.abc import Awaitable, Callable

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
from vitwire_gateway.spans import Attributes, Spans, request_span
from vitwire_gateway.workers import Workers

Endpoint = Callable[[Request], Awaitable[Response]]

_BODY_SECONDS = 60.0


def http_app(
    adapter: Adapter, workers: Workers, bodies: Budget, settings: SglangSettings, spans: Spans | None
) -> Starlette:
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

        return Route(path, _traced(path, endpoint, spans), methods=["POST"])

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


def _traced(path: str, endpoint: Endpoint, spans: Spans | None) -> Endpoint:
    """The endpoint, each of whose requests has a span."""
    name = f"POST {path}"
    known: Attributes = {"http.request.method": "POST", "http.route": path, "url.path": path, "url.scheme": "http"}

    async def traced(request: Request) -> Response:
        status = 500
        with request_span(spans, name, request.headers, known) as ending:
            try:
                response = await endpoint(request)
                status = response.status_code
                return response
            finally:
                ending.attributes["http.response.status_code"] = status
                ending.error, ending.is_fault = str(status) if status >= 400 else "", status >= 500

    return traced
