"""SGLang's encoder protocol over HTTP and gRPC.

Language servers speak HTTP unless SGLANG_ENCODER_MM_RECEIVER_MODE=grpc, which is `sglang.grpc.encoder.SglangEncoder`
with gRPC's health service.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import sglang_encoder_pb2 as pb
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vitwire.shared.fairness.budgets import Budget
from vitwire.shared.fairness.hosts import host_name, peer_name
from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.bodies import read_body
from vitwire_gateway.callers import Caller
from vitwire_gateway.gateway_settings import SglangSettings
from vitwire_gateway.sglang.adapter import Adapter
from vitwire_gateway.sglang.receiver_requests import Kind, read
from vitwire_gateway.spans import Attributes, Spans, request_span
from vitwire_gateway.workers import Workers

Context = grpc.aio.ServicerContext[Any, Any]
Endpoint = Callable[[Request], Awaitable[Response]]

_BODY_SECONDS = 60.0
_SERVICE = pb.DESCRIPTOR.services_by_name["SglangEncoder"].full_name
_SERVICES = ("", _SERVICE)
_WATCH_SECONDS = 5.0
_STREAMS = ("grpc.max_concurrent_streams", 900)
"""As Vitwire's server: more RPCs of one connection would fill gRPC's queue, which ends those of others."""
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_FAULTS = frozenset(code for status, code in _CODES.items() if status >= 500) | {grpc.StatusCode.INTERNAL}


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
                    body = await read_body(request, holding, settings.max_body_bytes, _BODY_SECONDS)
                    posted = await read(workers, caller, body, "json", kind)
                    del body
                    req_id = posted.req_id
                    await adapter.serve(posted, caller, holding)
            except ApiError as error:
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


def grpc_server(adapter: Adapter, workers: Workers, settings: SglangSettings, spans: Spans | None) -> grpc.aio.Server:
    """A server without ports yet. It gets messages as bytes, as those that take long to read are read in workers."""

    async def answered(body: bytes, method: str, kind: Kind, context: Context) -> None:
        caller = Caller.of(peer_name(context.peer()))
        name = f"{_SERVICE}/{method}"
        code = grpc.StatusCode.INTERNAL
        with request_span(spans, name, _headers(context), {"rpc.system.name": "grpc", "rpc.method": name}) as ending:
            try:
                await adapter.serve(await read(workers, caller, body, "message", kind), caller)
                code = grpc.StatusCode.OK
            except ApiError as error:
                code = _CODES.get(error.status, code)
                await context.abort(code, str(error))
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                raise
            finally:
                ending.attributes["rpc.response.status_code"] = code.name
                ending.error, ending.is_fault = "" if code is grpc.StatusCode.OK else code.name, code in _FAULTS

    async def encode(body: bytes, context: Context) -> pb.EncodeResponse:
        await answered(body, "Encode", "part", context)
        return pb.EncodeResponse()

    async def register(body: bytes, context: Context) -> pb.SchedulerReceiveUrlResponse:
        await answered(body, "SchedulerReceiveUrl", "registration", context)
        return pb.SchedulerReceiveUrlResponse()

    async def refuse(_: bytes, context: Context) -> NoReturn:
        message = "Send is for transfers by Mooncake; this encoder sends embeddings over ZMQ"
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, message)

    options = [("grpc.max_receive_message_length", settings.max_body_bytes), ("grpc.so_reuseport", 0), _STREAMS]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=4 * settings.max_requests)
    calls = {"Encode": encode, "SchedulerReceiveUrl": register, "Send": refuse}
    handlers: dict[str, Any] = {
        name: grpc.unary_unary_rpc_method_handler(call, response_serializer=lambda answer: answer.SerializeToString())
        for name, call in calls.items()
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE, handlers)])
    health_pb2_grpc.add_HealthServicer_to_server(_Health(adapter), server)
    return server


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # generated without types
    """Serving while Vitwire is."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in _SERVICES:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return await self._state()

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, _: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        if request.service not in _SERVICES:
            yield health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            return
        last = None
        while True:
            state = await self._state()
            if state != last:
                yield state
            last = state
            await asyncio.sleep(_WATCH_SECONDS)

    async def _state(self) -> health_pb2.HealthCheckResponse:
        states = health_pb2.HealthCheckResponse
        healthy = await self._adapter.is_healthy()
        return states(status=states.SERVING if healthy else states.NOT_SERVING)


def _headers(context: Context) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
