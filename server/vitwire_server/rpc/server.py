"""The gRPC server: ports, credentials, health, reflection."""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_reflection.v1alpha import reflection

from vitwire.wire import Malformed, read_plain
from vitwire_server.observe.tracing import Tracer
from vitwire_server.rpc.addresses import raise_if_port_taken, raise_if_socket_unusable
from vitwire_server.rpc.credentials import Certificates, TokenAuth, Tokens
from vitwire_server.rpc.grpc_types import Stream
from vitwire_server.rpc.service import SERVICE, EncoderService

_log = logging.getLogger(__name__)
LIVENESS = "liveness"
_FOREVER_MS = (1 << 31) - 1
_HANDSHAKE_MS = 20_000
"""A connection that has not completed its TLS and HTTP/2 handshake by then is closed."""
_PING_MS = 20_000
_MAX_STREAMS = 900
"""RPCs of a connection, reset ones included until they are cleared away; further ones wait at the client. Without
it one connection fills gRPC's queue of RPCs that no handler has, and gRPC ends those of others with CANCELLED."""
Request: TypeAlias = pb.HealthCheckRequest | Malformed
Answers: TypeAlias = Stream[Request, pb.HealthCheckResponse]
HEALTH = pb.DESCRIPTOR.services_by_name["Health"].full_name


def bracketed(host: str) -> str:
    """A host as it stands before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


@dataclass(frozen=True, slots=True)
class Listen:
    """Where to listen, and how callers are authenticated."""

    host: str
    port: int
    """0 picks a free one."""
    unix_socket: Path | None = None
    """Speaks no TLS: the permissions of the file say who may connect."""
    certificates: Certificates | None = None
    """None listens without TLS."""
    tokens: Tokens | None = None
    """None requires no token."""
    is_shared: bool = False
    """Other processes of this server listen on the port too; one of them reserved it."""
    max_age_seconds: float = 0.0
    """Age at which a connection is retired, so that its client resolves the name again; 0 for never."""
    max_connections: int = 1 << 16
    """At the port, and as many again at the Unix socket; further ones are closed at once."""

    @property
    def warnings(self) -> list[str]:
        """Why listening at this address is unsafe; empty if only this machine can connect."""
        if is_loopback(self.host):
            return []
        mutual = self.certificates is not None and self.certificates.mutual
        open_to_all = "serves anyone who can reach the port: see --auth-tokens-file or --tls-client-ca"
        unencrypted = "sends pixels, embeddings and tokens without TLS: see --tls-cert and --tls-key"
        reasons = {open_to_all: not (self.tokens or mutual), unencrypted: self.certificates is None}
        return [reason for reason, holds in reasons.items() if holds]


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class HealthService:
    """The health service, on one event loop.

    Unlike gRPC's, a watcher that does not read holds up neither a change of status nor others. A request that cannot
    be parsed is the caller's mistake: gRPC's would log a traceback and answer INTERNAL.
    """

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
        return grpc.method_handlers_generic_handler(HEALTH, methods)

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


class RpcServer:
    """EncoderService with health on one port. Create it on a running event loop."""

    def __init__(
        self,
        service: EncoderService,
        listen: Listen,
        *,
        max_message_bytes: int,
        reflects: bool,
        tracer: Tracer | None = None,
    ) -> None:
        self._listen = listen
        service.boundary.tracer = tracer
        self._health = HealthService()
        self._server = grpc.aio.server(
            interceptors=[service.boundary, *([TokenAuth(listen.tokens)] if listen.tokens else [])],
            options=(
                # A second server on the same port must fail, not share it silently.
                ("grpc.so_reuseport", int(listen.is_shared)),
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", -1),
                # No compression: gRPC inflates 360 KB to 250 MB before any handler sees the message.
                ("grpc.compression_enabled_algorithms_bitset", 1),
                ("grpc.max_allowed_incoming_connections", listen.max_connections),
                ("grpc.max_concurrent_streams", _MAX_STREAMS),
                ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
                # gRPC varies the age by 10 %; with an endless grace period RPCs in flight are never cut off.
                ("grpc.max_connection_age_ms", round(listen.max_age_seconds * 1000) or _FOREVER_MS),
                ("grpc.max_connection_age_grace_ms", _FOREVER_MS),
                # A half-open connection releases its permits within a minute and a half.
                ("grpc.keepalive_time_ms", 60_000),
                ("grpc.keepalive_timeout_ms", _PING_MS),
                ("grpc.http2.ping_timeout_ms", _PING_MS),  # without it gRPC 1.85 waits a minute for the answer
                ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ),
        )
        self._server.add_generic_rpc_handlers((service.handlers(), self._health.handlers()))
        if reflects:
            names = (SERVICE, HEALTH, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)

    async def start(self) -> int:
        """Listen, alive but not ready; returns the port. Raises OSError if it is taken."""
        listen, tls = self._listen, self._listen.certificates
        address = f"{bracketed(listen.host)}:{listen.port}"
        for reason in listen.warnings:
            _log.warning("listening on %s, which %s", listen.host, reason)
        self.set_ready(ready=False)
        self.set_alive(alive=True)
        try:
            if not listen.is_shared:
                raise_if_port_taken(listen.host, listen.port)
            if tls:
                port = self._server.add_secure_port(address, tls.credentials())
            else:
                port = self._server.add_insecure_port(address)
        except (OSError, RuntimeError) as error:
            raise OSError(f"cannot listen on {listen.host}:{listen.port}: {error}") from error
        try:
            if listen.unix_socket:
                raise_if_socket_unusable(listen.unix_socket)
                self._server.add_insecure_port(f"unix:{listen.unix_socket}")
        except (OSError, RuntimeError) as error:
            raise OSError(f"cannot listen on {listen.unix_socket}: {error}") from error
        await self._server.start()
        return port

    def set_ready(self, *, ready: bool) -> None:
        """Tell readiness probes and balancers."""
        for name in ("", SERVICE):
            self._health.set(name, serving=ready)

    def set_alive(self, *, alive: bool) -> None:
        """Tell liveness probes."""
        self._health.set(LIVENESS, serving=alive)

    async def stop(self, grace: float) -> None:
        """Take no more RPCs; those in flight have `grace` seconds."""
        await self._server.stop(grace)
