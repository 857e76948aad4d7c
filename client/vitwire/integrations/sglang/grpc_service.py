"""SGLang's encoder protocol over gRPC: `sglang.grpc.encoder.SglangEncoder`, with gRPC's health service."""

import asyncio
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import sglang_encoder_pb2 as pb
from smg_grpc_proto import sglang_encoder_pb2_grpc as pb_grpc

from vitwire.integrations.sglang.adapter import Adapter
from vitwire.integrations.sglang.parts import Refused, part_of_message, registration_of_message

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


def grpc_server(adapter: Adapter, *, max_body_bytes: int, max_requests: int) -> grpc.aio.Server:
    """A server without ports yet."""
    options = [("grpc.max_receive_message_length", max_body_bytes), ("grpc.so_reuseport", 0)]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=max_requests)
    pb_grpc.add_SglangEncoderServicer_to_server(_Encoder(adapter), server)
    health_pb2_grpc.add_HealthServicer_to_server(_Health(adapter), server)
    return server


class _Encoder(pb_grpc.SglangEncoderServicer):  # type: ignore[misc]  # generated without types
    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    async def Encode(self, request: pb.EncodeRequest, context: Context) -> pb.EncodeResponse:  # noqa: N802
        try:
            await self._adapter.encode(part_of_message(request))
        except Refused as error:
            await _abort(context, error)
        return pb.EncodeResponse()

    async def SchedulerReceiveUrl(  # noqa: N802
        self, request: pb.SchedulerReceiveUrlRequest, context: Context
    ) -> pb.SchedulerReceiveUrlResponse:
        try:
            self._adapter.register(registration_of_message(request))
        except Refused as error:
            await _abort(context, error)
        return pb.SchedulerReceiveUrlResponse()

    async def Send(self, _: pb.SendRequest, context: Context) -> NoReturn:  # noqa: N802
        message = "Send is for transfers by Mooncake; this encoder sends embeddings over ZMQ"
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, message)


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


async def _abort(context: Context, error: Refused) -> NoReturn:
    await context.abort(_CODES.get(error.status, grpc.StatusCode.INTERNAL), str(error))
