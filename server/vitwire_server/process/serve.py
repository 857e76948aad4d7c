"""One server process from start to drained: load, serve, lame duck, stop."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

from vitwire_server.caching.cache import EmbeddingCache
from vitwire_server.caching.single_flight import SingleFlight
from vitwire_server.config.settings import ServeSettings, UsageError
from vitwire_server.core.health import Health, State
from vitwire_server.fitting.traces import TraceWriter
from vitwire_server.observe.http import MetricsServer
from vitwire_server.observe.logs import plain_line
from vitwire_server.observe.metrics import Metrics
from vitwire_server.process.descriptors import metrics_connections, raise_limit, rpc_connections
from vitwire_server.process.life import EngineThread, Life
from vitwire_server.process.loading import Assembly, assemble
from vitwire_server.process.signals import on_signals
from vitwire_server.rpc.calls import Serving
from vitwire_server.rpc.certificates import Certificates
from vitwire_server.rpc.codec import Codec
from vitwire_server.rpc.receive_slots import ReceiveSlots
from vitwire_server.rpc.server import Extras, Listen, RpcServer, bracketed
from vitwire_server.rpc.service import EncoderService
from vitwire_server.rpc.tokens import Tokens
from vitwire_server.scheduling.admission import Admission
from vitwire_server.scheduling.canary import Canary
from vitwire_server.scheduling.scheduler import Scheduler
from vitwire_server.towers.files import CheckpointError

if TYPE_CHECKING:
    from vitwire_server.observe.otlp import OtlpTracer

_log = logging.getLogger(__name__)
T = TypeVar("T")
_EXIT_SECONDS = 10.0


async def serve(settings: ServeSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. A second signal ends at once.

    Raises CheckpointError, UsageError, or OSError if a port is taken.
    """
    stopping = _stop_on_signals(settings.log_format)
    raise_limit()
    metrics = Metrics()
    metrics.admits(settings.max_queued_items, settings.max_queued_bytes)
    trace = _trace(settings)
    health = Health()
    slots = ReceiveSlots(settings.message_bytes, settings.max_queued_bytes, settings.idle_seconds)
    service = EncoderService(metrics, health, slots, settings.idle_seconds)
    pages = _pages(settings, metrics, health)
    tracer = _tracer(settings)
    rpc = RpcServer(
        service,
        _listen(settings),
        max_message_bytes=settings.message_bytes,
        extras=Extras(reflection=settings.reflection, channelz=settings.channelz),
        tracer=tracer,
    )
    port = await rpc.start()
    if pages:
        pages.start()
    metrics_at = f"on {bracketed(settings.metrics_host)}:{pages.port}" if pages else "off"
    _tell(plain_line(f"listening on {bracketed(settings.host)}:{port}, metrics {metrics_at}", settings.log_format))
    try:
        return await _until_stopped(settings, metrics, service, Life(health, rpc), trace, stopping)
    finally:
        await rpc.stop(0)
        if pages:
            pages.stop()
        if trace:
            trace.close()
        if tracer:
            tracer.close()


def _listen(settings: ServeSettings) -> Listen:
    """Raises UsageError over files of certificates and tokens that cannot be used."""
    cert, key, tokens = settings.tls_cert, settings.tls_key, settings.auth_tokens_file
    try:
        certificates = Certificates(cert, key, settings.tls_client_ca) if cert and key else None
    except (OSError, ValueError) as error:
        raise UsageError(f"--tls-cert, --tls-key, --tls-client-ca: {error}") from error
    try:
        gate = Tokens(tokens) if tokens else None
    except (OSError, ValueError) as error:
        raise UsageError(f"--auth-tokens-file: {error}") from error
    listeners = 2 if settings.unix_socket else 1
    return Listen(
        settings.host,
        settings.port,
        settings.unix_socket,
        certificates,
        gate,
        max_age_seconds=settings.max_connection_age_seconds,
        max_connections=rpc_connections() // listeners,
    )


def _pages(settings: ServeSettings, metrics: Metrics, health: Health) -> MetricsServer | None:
    if not settings.metrics:
        return None
    host, port = settings.metrics_host, settings.metrics_port
    return MetricsServer(metrics.registry, health, host, port, metrics_connections())


def _tracer(settings: ServeSettings) -> "OtlpTracer | None":
    if not settings.otlp_endpoint:
        return None
    from vitwire_server.observe.otlp import OtlpTracer  # noqa: PLC0415 - only those who trace pay for the import

    return OtlpTracer(settings.otlp_endpoint)


def _trace(settings: ServeSettings) -> TraceWriter | None:
    try:
        return TraceWriter(settings.record_trace) if settings.record_trace else None
    except OSError as error:
        raise UsageError(f"--record-trace {settings.record_trace}: {error.strerror}") from error


async def _until_stopped(
    settings: ServeSettings,
    metrics: Metrics,
    service: EncoderService,
    life: Life,
    trace: TraceWriter | None,
    stopping: asyncio.Event,
) -> int:
    loading = _in_daemon(lambda: assemble(settings, metrics, life.warm))
    await _first(loading, stopping.wait())
    if loading.cancelled():
        return 0
    try:
        assembly = loading.result()
    except (CheckpointError, UsageError):
        raise
    except Exception as error:  # a file that is broken in a way nobody thought of
        _log.debug("loading failed", exc_info=True)
        raise CheckpointError(f"{settings.model} cannot be served: {error!r}") from error
    (batch,) = assembly.planner.plan([assembly.canary.footprint]).batches
    canary = Canary(assembly.canary, batch, settings.canary_seconds)
    scheduler = Scheduler(assembly.engine, assembly.planner, metrics, canary=canary)
    engine = EngineThread(scheduler)
    engine.start()
    service.serving = _serving(settings, metrics, assembly, scheduler, trace)
    await life.become(State.SERVING)
    card = assembly.card
    _tell(plain_line(f"ready: {card.model_type} {card.model_id} on {card.device}", settings.log_format))
    watching = asyncio.create_task(life.watch(scheduler, settings.wedge_seconds))
    await _first(stopping.wait(), engine.ended.wait())
    watching.cancel()
    if not engine.ended.is_set():
        await life.drain()
        _log.info("draining: readiness is off; serving for another %g s", settings.lame_duck_seconds)
        await _first(asyncio.sleep(settings.lame_duck_seconds), engine.ended.wait())
    if engine.ended.is_set():
        await life.become(State.FAILED, "the engine stopped")
    await service.drain(settings.drain_seconds)
    await life.end()
    scheduler.close()
    await _first(engine.ended.wait(), asyncio.sleep(_EXIT_SECONDS))
    return int(engine.failed)


def _serving(
    settings: ServeSettings, metrics: Metrics, assembly: Assembly, scheduler: Scheduler, trace: TraceWriter | None
) -> Serving:
    card = assembly.card
    admission = Admission(settings.max_queued_items, settings.max_queued_bytes, metrics.admitted_changed)
    single_flight = SingleFlight(EmbeddingCache(settings.cache_bytes, metrics.cache_changed), metrics)
    return Serving(card, Codec(card, assembly.tower.footprint), scheduler, admission, single_flight, trace)


def _in_daemon(call: Callable[[], T]) -> asyncio.Future[T]:
    """Run `call` in a thread that does not keep the process from exiting."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(outcome: T | Exception) -> None:
        if future.cancelled():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def run() -> None:
        outcome: T | Exception
        try:
            outcome = call()
        except Exception as error:  # noqa: BLE001 - the future's owner gets whatever it was
            outcome = error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, outcome)

    Thread(target=run, name="loading", daemon=True).start()
    return future


def _tell(line: str) -> None:
    """A line on stdout, for whoever started this and may have read enough."""
    try:
        print(line, flush=True)
    except OSError as error:
        _log.warning("stdout was closed: %s", error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def _first(*awaitables: Awaitable[object]) -> None:
    """Return when one of them is done; cancel the others."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _stop_on_signals(log_format: str) -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; the second ends the process at once."""
    stopping = asyncio.Event()

    def end() -> None:
        sys.stderr.write(plain_line("second signal: exiting now", log_format, "warning") + "\n")
        signal.raise_signal(signal.SIGKILL)

    on_signals(stopping.set, end)
    return stopping
