"""One server process: load the model, serve, drain, stop."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

from vitwire.agents import MISSING, AgentError, is_installed
from vitwire_server.caching.cache import EmbeddingCache
from vitwire_server.caching.single_flight import SingleFlight
from vitwire_server.config.settings import ServeSettings, UsageError
from vitwire_server.core.health import Health, State
from vitwire_server.delivery.courier import Courier
from vitwire_server.delivery.transfers import Bounds
from vitwire_server.fitting.traces import TraceWriter
from vitwire_server.observe.http import MetricsServer
from vitwire_server.observe.logs import plain_line
from vitwire_server.observe.metrics import Metrics
from vitwire_server.process.descriptors import metrics_connections, raise_limit, rpc_connections
from vitwire_server.process.lifecycle import EngineThread, Lifecycle
from vitwire_server.process.loading import LoadedModel, load_model
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
from vitwire_server.scheduling.intake import Intake
from vitwire_server.scheduling.scheduler import Scheduler
from vitwire_server.sessions.local import LocalSessions
from vitwire_server.towers.files import CheckpointError

if TYPE_CHECKING:
    from vitwire_server.observe.otlp import OtlpTracer

_log = logging.getLogger(__name__)
T = TypeVar("T")
_EXIT_SECONDS = 10.0


async def serve(settings: ServeSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. A second signal kills the process.

    Raises CheckpointError, UsageError, or OSError if a port is taken.
    """
    stopping = _stop_on_signals(settings.log_format)
    raise_limit()
    if settings.nixl and not is_installed():
        raise UsageError(f"--nixl: {MISSING}")
    metrics = Metrics()
    metrics.admission.limits(settings.max_queued_items, settings.max_queued_bytes)
    trace = _trace(settings)
    health = Health()
    slots = ReceiveSlots(settings.message_bytes, settings.max_queued_bytes, settings.idle_seconds)
    service = EncoderService(metrics.rpc, health, slots, settings.idle_seconds)
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
    _print(plain_line(f"listening on {bracketed(settings.host)}:{port}, metrics {metrics_at}", settings.log_format))
    try:
        return await _until_stopped(settings, metrics, service, Lifecycle(health, rpc), trace, stopping)
    finally:
        await rpc.stop(0)
        if pages:
            pages.stop()
        if trace:
            trace.close()
        if tracer:
            tracer.close()


def _listen(settings: ServeSettings) -> Listen:
    """Where and how to listen. Raises UsageError for unusable certificate or token files."""
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
    from vitwire_server.observe.otlp import OtlpTracer  # noqa: PLC0415 - slow import, needed only for tracing

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
    lifecycle: Lifecycle,
    trace: TraceWriter | None,
    stopping: asyncio.Event,
) -> int:
    courier = await asyncio.to_thread(_courier, settings, metrics) if settings.nixl else None
    loading = _in_daemon_thread(lambda: load_model(settings, metrics, lifecycle.weights_loaded_threadsafe))
    await _any_of(loading, stopping.wait())
    if loading.cancelled():
        return 0
    try:
        model = loading.result()
    except (CheckpointError, UsageError):
        raise
    except Exception as error:  # a broken file may fail in any way
        _log.debug("loading failed", exc_info=True)
        raise CheckpointError(f"{settings.model} cannot be served: {error!r}") from error
    (batch,) = model.planner.plan([model.canary.footprint]).batches
    canary = Canary(model.canary, batch, settings.canary_seconds)
    scheduler = Scheduler(model.engine, model.planner, metrics.engine, canary=canary)
    engine = EngineThread(scheduler)
    engine.start()
    service.serving = _serving(settings, metrics, model, scheduler.intake, trace, courier)
    await lifecycle.set_state(State.SERVING)
    card = model.card
    _print(plain_line(f"ready: {card.model_type} {card.model_id} on {card.device}", settings.log_format))
    watching = asyncio.create_task(lifecycle.watch_engine(scheduler, settings.wedge_seconds))
    await _any_of(stopping.wait(), engine.ended.wait())
    watching.cancel()
    if not engine.ended.is_set():
        await lifecycle.start_draining()
        _log.info("draining: readiness is off; serving for another %g s", settings.lame_duck_seconds)
        await _any_of(asyncio.sleep(settings.lame_duck_seconds), engine.ended.wait())
    if engine.ended.is_set():
        await lifecycle.set_state(State.FAILED, "the engine stopped")
    await service.drain(settings.drain_seconds)
    await lifecycle.close_ports()
    if courier:
        await asyncio.to_thread(courier.close)
    scheduler.intake.close()
    await _any_of(engine.ended.wait(), asyncio.sleep(_EXIT_SECONDS))
    return int(engine.failed)


def _courier(settings: ServeSettings, metrics: Metrics) -> Courier:
    """Raises UsageError where NIXL does not work."""
    try:
        return Courier(metrics.delivery, bounds=Bounds(seconds=settings.nixl_seconds))
    except AgentError as error:
        raise UsageError(f"--nixl: {error}") from error


def _serving(
    settings: ServeSettings,
    metrics: Metrics,
    model: LoadedModel,
    intake: Intake,
    trace: TraceWriter | None,
    courier: Courier | None,
) -> Serving:
    card = replace(model.card, nixl=courier is not None)
    admission = Admission(settings.max_queued_items, settings.max_queued_bytes, metrics.admission.changed)
    single_flight = SingleFlight(EmbeddingCache(settings.cache_bytes, metrics.cache.changed), metrics.cache)
    sessions = LocalSessions(card, intake, admission, single_flight, metrics.admission, trace=trace, courier=courier)
    return Serving(card, Codec(card, model.tower.footprints), sessions)


def _in_daemon_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """Run `call` in a daemon thread, which does not keep the process from exiting."""
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
        except Exception as error:  # noqa: BLE001 - raised again by the future
            outcome = error
        with suppress(RuntimeError):  # the loop is closed: the process is about to exit
            loop.call_soon_threadsafe(settle, outcome)

    Thread(target=run, name="loading", daemon=True).start()
    return future


def _print(line: str) -> None:
    """Print a line on stdout, whose reader may be gone."""
    try:
        print(line, flush=True)
    except OSError as error:
        _log.warning("stdout was closed: %s", error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


async def _any_of(*awaitables: Awaitable[object]) -> None:
    """Wait until one of them is done and cancel the others."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _stop_on_signals(log_format: str) -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; the second kills the process."""
    stopping = asyncio.Event()

    def kill() -> None:
        sys.stderr.write(plain_line("second signal: exiting now", log_format, "warning") + "\n")
        signal.raise_signal(signal.SIGKILL)

    on_signals(stopping.set, kill)
    return stopping
