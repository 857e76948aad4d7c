"""The health service. Unlike gRPC's, a watcher that does not read holds up neither a change of status nor others."""

import asyncio

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from vitwire_server.rpc.grpc_types import Stream

Answers = Stream[pb.HealthCheckRequest, pb.HealthCheckResponse]


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # untyped
    """Used on one event loop."""

    def __init__(self) -> None:
        self._statuses: dict[str, pb.HealthCheckResponse.ServingStatus] = {}
        self._changed = asyncio.Event()
        """Set at the next change of any status, and then replaced."""

    def set(self, service: str, status: pb.HealthCheckResponse.ServingStatus) -> None:
        """Change the status of a service."""
        self._statuses[service] = status
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: pb.HealthCheckRequest, context: Answers) -> pb.HealthCheckResponse:  # noqa: N802 - as in the proto
        """Called by gRPC."""
        if request.service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return pb.HealthCheckResponse(status=self._statuses[request.service])

    async def Watch(self, request: pb.HealthCheckRequest, context: Answers) -> None:  # noqa: N802 - as above
        """Called by gRPC; ends when the client or the server does."""
        shown = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, pb.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != shown:
                await context.write(pb.HealthCheckResponse(status=status))
                shown = status
            await changed.wait()
