"""The gRPC server: ports, health, reflection."""

from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from vitwire_server.rpc.service import SERVICE, EncoderService, handlers

LIVENESS = "liveness"
_READINESS = ("", SERVICE)
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def bracketed(host: str) -> str:
    """A host as it stands before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


@dataclass(frozen=True, slots=True)
class Listen:
    """Where to listen."""

    host: str
    port: int
    """0 takes a free one."""
    unix_socket: Path | None = None


class RpcServer:
    """EncoderService with health and reflection on one port. To be built on a running event loop."""

    def __init__(self, service: EncoderService, *, max_message_bytes: int, with_reflection: bool) -> None:
        self._health = health_aio.HealthServicer()
        self._server = grpc.aio.server(
            options=(
                # A second server on the same port must fail, not share it silently.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", -1),
                # A half-open connection gives its permits back within a minute and a half.
                ("grpc.keepalive_time_ms", 60_000),
                ("grpc.keepalive_timeout_ms", 20_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            )
        )
        self._server.add_generic_rpc_handlers((handlers(service),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if with_reflection:
            names = (SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)

    async def start(self, listen: Listen) -> int:
        """Listen, alive but not ready; returns the port. Raises OSError if it is taken."""
        await self.set_ready(ready=False)
        await self.set_alive(alive=True)
        try:
            port = self._server.add_insecure_port(f"{bracketed(listen.host)}:{listen.port}")
        except RuntimeError as error:
            raise OSError(f"cannot listen on {listen.host}:{listen.port}: {error}") from error
        try:
            if listen.unix_socket:
                self._server.add_insecure_port(f"unix:{listen.unix_socket}")
        except RuntimeError as error:
            raise OSError(f"cannot listen on {listen.unix_socket}: {error}") from error
        await self._server.start()
        return port

    async def set_ready(self, *, ready: bool) -> None:
        """What readiness probes and balancers see."""
        for name in _READINESS:
            await self._health.set(name, _SERVING if ready else _NOT_SERVING)

    async def set_alive(self, *, alive: bool) -> None:
        """What liveness probes see."""
        await self._health.set(LIVENESS, _SERVING if alive else _NOT_SERVING)

    async def stop(self, grace: float) -> None:
        """Take no more RPCs; those in flight have `grace` seconds."""
        await self._server.stop(grace)
