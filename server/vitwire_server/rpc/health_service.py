"""The health service. Unlike gRPC's, a watcher that does not read holds up neither a change of status nor others.

A request that cannot be parsed is the caller's mistake: gRPC's would log a traceback and answer INTERNAL.
"""

import asyncio
from functools import partial
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2 as pb

from vitwire.wire import Malformed, read_plain
from vitwire_server.rpc.grpc_types import Stream

Request: TypeAlias = pb.HealthCheckRequest | Malformed
Answers: TypeAlias = Stream[Request, pb.HealthCheckResponse]
SERVICE = pb.DESCRIPTOR.services_by_name["Health"].full_name


class HealthService:
    """Used on one event loop."""

    def __init__(self) -> None:
        self._statuses: dict[str, pb.HealthCheckResponse.ServingStatus] = {}
        self._changed = asyncio.Event()
        """Set at the next change of any status, and then replaced."""

    def set(self, service: str, *, serving: bool) -> None:
        """Change the status of a service."""
        self._statuses[service] = pb.HealthCheckResponse.SERVING if serving else pb.HealthCheckResponse.NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    def handlers(self) -> grpc.GenericRpcHandler:
        """The service's methods."""
        read, write = partial(read_plain, pb.HealthCheckRequest), pb.HealthCheckResponse.SerializeToString
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, read, write),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, read, write),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _check(self, request: Request, context: Answers) -> pb.HealthCheckResponse:
        service = await _service_of(request, context)
        if service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return pb.HealthCheckResponse(status=self._statuses[service])

    async def _watch(self, request: Request, context: Answers) -> None:
        """Ends when the client or the server does."""
        service, shown = await _service_of(request, context), None
        while True:
            changed = self._changed
            status = self._statuses.get(service, pb.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != shown:
                await context.write(pb.HealthCheckResponse(status=status))
                shown = status
            await changed.wait()


async def _service_of(request: Request, context: Answers) -> str:
    if isinstance(request, Malformed):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "not a valid protobuf message")
    name: str = request.service
    return name
