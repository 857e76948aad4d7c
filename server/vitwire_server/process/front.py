"""The gRPC side of a server, in this process."""

import asyncio
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from vitwire_server.config.settings import ServeSettings
from vitwire_server.core.footprints import Footprints
from vitwire_server.core.health import Health
from vitwire_server.core.models import ModelCard
from vitwire_server.observe.metrics.rpc import RpcMetrics
from vitwire_server.process.file_decoding import decoding, started
from vitwire_server.process.hanging_files import read_at_start, refresh_for_ever
from vitwire_server.process.system import rpc_connections
from vitwire_server.rpc.calls import Serving
from vitwire_server.rpc.codec import Codec
from vitwire_server.rpc.credentials import Certificates, Tokens
from vitwire_server.rpc.receive_slots import ReceiveSlots
from vitwire_server.rpc.server import Listen, RpcServer
from vitwire_server.rpc.service import EncoderService
from vitwire_server.sessions.session import Sessions

if TYPE_CHECKING:
    from vitwire_server.observe.otlp import OtlpTracer
    from vitwire_server.preparing.files.pool import DecodePool

_TLS = "--tls-cert, --tls-key, --tls-client-ca"
_TOKENS = "--auth-tokens-file"


@dataclass(slots=True)
class LocalFront:
    """Speaks gRPC for an engine of this process, or of the one that this edge serves. Used on the event loop.

    One of `processes` that share `port`; None listens on the port of the settings alone.
    """

    settings: ServeSettings
    metrics: RpcMetrics
    health: Health
    processes: int = 1
    port: int | None = None
    _service: EncoderService = field(init=False)
    _decoders: "DecodePool | None" = None
    _tracer: "OtlpTracer | None" = None
    _rpc: RpcServer | None = None
    _refreshing: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        settings, seconds = self.settings, self.settings.idle_seconds
        slots = ReceiveSlots(settings.message_bytes, settings.max_queued_bytes // self.processes, seconds)
        self._service = EncoderService(self.metrics, self.health, slots, seconds)
        if settings.otlp_endpoint:
            from vitwire_server.observe import otlp  # noqa: PLC0415 - slow import, needed only for tracing

            self._tracer = otlp.tracer(settings.otlp_endpoint)

    def serve(self, card: ModelCard, footprints: Footprints, sessions: Sessions) -> None:
        """The model is loaded: accept RPCs."""
        offered = decoding(self.settings, card, self.metrics, self.processes, self._decoders)
        self._service.serving = Serving(card, Codec(card, footprints), sessions, offered)

    async def prepared(self) -> None:
        """Wait until decoders are ready for files, if the model takes any; after `serve`."""
        assert self._service.serving, "see above"
        if offered := self._service.serving.decoding:
            await offered.pool.ready()
        elif self._decoders:
            await self._decoders.close()

    def describe(self, card: ModelCard) -> None:
        """Answer GetModel with another description of the model that is served."""
        if self._service.serving:
            self._service.serving = replace(self._service.serving, card=card)

    async def start(self) -> int:
        """Listen, alive but not ready; returns the port. Raises OSError or UsageError."""
        settings = self.settings
        listen = await _listen(settings, self.port, self.metrics)
        self._rpc = RpcServer(
            self._service,
            listen,
            max_message_bytes=settings.message_bytes,
            reflects=settings.reflection,
            tracer=self._tracer.rpc if self._tracer else None,
        )
        port = await self._rpc.start()
        self._decoders = started(settings, self.metrics, self.processes)
        for flags, files in ((_TLS, listen.certificates), (_TOKENS, listen.tokens)):
            if files:
                self._refreshing.append(asyncio.create_task(refresh_for_ever(flags, files.refresh)))
        return port

    async def show(self) -> None:
        """Let probes see the server's state."""
        assert self._rpc, "it was started"
        self._rpc.set_ready(ready=self.health.is_ready)
        self._rpc.set_alive(alive=self.health.is_alive)

    async def watch(self) -> None:
        """Wait until RPCs cannot be served any more; here that is forever."""
        await asyncio.get_running_loop().create_future()

    async def drain(self, seconds: float) -> None:
        """Refuse new RPCs; wait at most `seconds` until those in flight are answered."""
        await self._service.drain(seconds)

    async def stop(self) -> None:
        """Close the ports and end open connections; a second call does nothing."""
        for task in self._refreshing:
            task.cancel()
        if self._rpc:
            await self._rpc.stop(0)
        if self._decoders:
            await self._decoders.close()
        if self._tracer:
            self._tracer.close()
            self._tracer = None


async def _listen(settings: ServeSettings, shared_port: int | None, metrics: RpcMetrics) -> Listen:
    """Addresses, certificates and tokens. Raises UsageError for unusable certificate or token files."""
    cert, key, tokens = settings.tls_cert, settings.tls_key, settings.auth_tokens_file
    certificates = gate = None
    if cert and key:
        certificates = await read_at_start(
            _TLS, partial(Certificates, cert, key, settings.tls_client_ca, metrics.certificate_loaded)
        )
    if tokens:
        gate = await read_at_start(_TOKENS, partial(Tokens, tokens, settings.http_token))
    listeners = 2 if settings.unix_socket else 1
    return Listen(
        settings.host,
        settings.port if shared_port is None else shared_port,
        settings.unix_socket,
        certificates,
        gate,
        is_shared=shared_port is not None,
        max_age_seconds=settings.max_connection_age_seconds,
        max_connections=rpc_connections() // listeners,
    )
