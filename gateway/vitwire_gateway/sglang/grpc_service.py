"""SGLang's encoder protocol over gRPC: `sglang.grpc.encoder.SglangEncoder`, with gRPC's health service."""

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any, NoReturn
from urllib.parse import unquote

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import sglang_encoder_pb2 as pb

from vitwire_gateway.openai.shares import Caller, host_name
from vitwire_gateway.openai.workers import Workers
from vitwire_gateway.sglang.adapter import Adapter
from vitwire_gateway.sglang.parts import Refused
from vitwire_gateway.sglang.reading import Kind, Posted, read

Context = grpc.aio.ServicerContext[Any, Any]

_SERVICE = pb.DESCRIPTOR.services_by_name["SglangEncoder"].full_name
_SERVICES = ("", _SERVICE)
_WATCH_SECONDS = 5.0
_CODES = {
    HTTPStatus.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.NOT_IMPLEMENTED: grpc.StatusCode.UNIMPLEMENTED,
    HTTPStatus.SERVICE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def grpc_server(adapter: Adapter, workers: Workers, *, max_body_bytes: int, max_requests: int) -> grpc.aio.Server:
    """A server without ports yet."""
    options = [("grpc.max_receive_message_length", max_body_bytes), ("grpc.so_reuseport", 0)]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=max_requests)
    service = _Encoder(adapter, workers)
    answers = {
        "Encode": (service.encode, pb.EncodeResponse),
        "SchedulerReceiveUrl": (service.register, pb.SchedulerReceiveUrlResponse),
        "Send": (service.refuse, pb.SendResponse),
    }
    handlers: dict[str, Any] = {
        name: grpc.unary_unary_rpc_method_handler(call, response_serializer=answer.SerializeToString)
        for name, (call, answer) in answers.items()
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE, handlers)])
    health_pb2_grpc.add_HealthServicer_to_server(_Health(adapter), server)
    return server


class _Encoder:
    """The methods; they get messages as bytes, as those that take long to read are read in workers."""

    def __init__(self, adapter: Adapter, workers: Workers) -> None:
        self._adapter = adapter
        self._workers = workers

    async def encode(self, body: bytes, context: Context) -> pb.EncodeResponse:
        try:
            posted, caller = await self._read(body, "part", context)
            if posted.part:
                await self._adapter.encode(posted.part, caller)
        except Refused as error:
            await _abort(context, error)
        return pb.EncodeResponse()

    async def register(self, body: bytes, context: Context) -> pb.SchedulerReceiveUrlResponse:
        try:
            posted, caller = await self._read(body, "registration", context)
            if posted.registration:
                self._adapter.register(posted.registration, caller)
        except Refused as error:
            await _abort(context, error)
        return pb.SchedulerReceiveUrlResponse()

    async def refuse(self, _: bytes, context: Context) -> NoReturn:
        message = "Send is for transfers by Mooncake; this encoder sends embeddings over ZMQ"
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, message)

    async def _read(self, body: bytes, kind: Kind, context: Context) -> tuple[Posted, Caller]:
        caller = Caller.of(_host(context.peer()))
        posted = await read(self._workers, caller, body, "message", kind)
        if posted.refusal:
            raise posted.refusal
        return posted, caller


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


def _host(peer: str) -> str:
    """The caller's name; peers are `ipv4:10.0.0.1:5000`, `ipv6:%5Bfd00::1%5D:5000` or `unix:...`."""
    kind, _, address = unquote(peer).partition(":")
    return host_name(address.rpartition(":")[0].strip("[]")) if kind in ("ipv4", "ipv6") else kind


async def _abort(context: Context, error: Refused) -> NoReturn:
    await context.abort(_CODES.get(error.status, grpc.StatusCode.INTERNAL), str(error))
