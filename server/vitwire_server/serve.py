"""One server process from start to drained: load, serve, lame duck, stop."""

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from threading import Thread
from typing import TypeVar

from vitwire.allocator import trim
from vitwire_server.loading import assemble
from vitwire_server.observe.http import MetricsServer
from vitwire_server.observe.metrics import Metrics
from vitwire_server.rpc.codec import Codec
from vitwire_server.rpc.server import Listen, RpcServer, bracketed
from vitwire_server.rpc.service import EncoderService, Serving
from vitwire_server.scheduling.admission import Admission
from vitwire_server.scheduling.scheduler import Scheduler
from vitwire_server.scheduling.traces import TraceWriter
from vitwire_server.settings import ServeSettings, UsageError
from vitwire_server.towers.checkpoint import CheckpointError

_log = logging.getLogger(__name__)
T = TypeVar("T")
_STALL_SECONDS = 120.0
"""The engine's thread comes by at least twice a second, or after each batch."""
_IDLE_SECONDS = 10.0
_EXIT_SECONDS = 10.0
_WATCH_SECONDS = 1.0


class EngineThread(Thread):
    """Runs the scheduler; tells the loop when it ended, and whether it failed."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(name="engine", daemon=True)
        self._scheduler = scheduler
        self._loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        self.failed = True

    def run(self) -> None:
        """Called by Thread.start."""
        try:
            self._scheduler.run()
            self.failed = False
        except Exception:  # noqa: BLE001 - the engine's loop: whatever it was, the process must end
            _log.exception("the engine stopped")
        finally:
            with suppress(RuntimeError):  # the loop is closed: the process is about to exit
                self._loop.call_soon_threadsafe(self.ended.set)


async def serve(settings: ServeSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. A second signal ends at once.

    Raises CheckpointError, UsageError, or OSError if a port is taken.
    """
    stopping = _stop_on_signals()
    metrics = Metrics()
    trace = _trace(settings)
    service = EncoderService(metrics, Admission(settings.max_queued_items, settings.max_queued_bytes), trace)
    pages = MetricsServer(
        metrics.registry,
        lambda: service.serving is not None and not stopping.is_set(),
        settings.metrics_host,
        settings.metrics_port,
    )
    rpc = RpcServer(
        service,
        max_message_bytes=settings.message_bytes,
        with_reflection=settings.reflection,
    )
    port = await rpc.start(Listen(settings.host, settings.port, settings.unix_socket))
    pages.start()
    host, metrics_host = bracketed(settings.host), bracketed(settings.metrics_host)
    print(f"listening on {host}:{port}, metrics on {metrics_host}:{pages.port}", flush=True)
    try:
        return await _until_stopped(settings, metrics, service, rpc, stopping)
    finally:
        await rpc.stop(0)
        pages.stop()
        if trace:
            trace.close()


def _trace(settings: ServeSettings) -> TraceWriter | None:
    try:
        return TraceWriter(settings.record_trace) if settings.record_trace else None
    except OSError as error:
        raise UsageError(f"--record-trace {settings.record_trace}: {error.strerror}") from error


async def _until_stopped(
    settings: ServeSettings,
    metrics: Metrics,
    service: EncoderService,
    rpc: RpcServer,
    stopping: asyncio.Event,
) -> int:
    loading = _in_daemon(lambda: assemble(settings, metrics))
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
    scheduler = Scheduler(assembly.engine, assembly.planner, metrics)
    engine = EngineThread(scheduler)
    engine.start()
    service.serving = Serving(assembly.card, Codec(assembly.card, assembly.tower.footprint), scheduler)
    await rpc.set_ready(ready=True)
    print(f"ready: {assembly.card.model_type} {assembly.card.model_id} on {assembly.card.device}", flush=True)
    watching = asyncio.create_task(_watch(scheduler, rpc))
    await _first(stopping.wait(), engine.ended.wait())
    await rpc.set_ready(ready=False)
    if not engine.ended.is_set():
        _log.info("draining: not ready from now on, %g s of lame duck", settings.lame_duck_seconds)
        await _first(asyncio.sleep(settings.lame_duck_seconds), engine.ended.wait())
    watching.cancel()
    if engine.ended.is_set():
        await rpc.set_alive(alive=False)
    await service.drain(settings.drain_seconds)
    await rpc.stop(0)
    scheduler.close()
    await _first(engine.ended.wait(), asyncio.sleep(_EXIT_SECONDS))
    return int(engine.failed)


async def _watch(scheduler: Scheduler, rpc: RpcServer) -> None:
    """Liveness follows the engine's heartbeat; freed memory goes back to the system when idle."""
    alive, trimmed_at = True, 0.0
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        now = scheduler.now()
        if alive is not (now - scheduler.last_beat < _STALL_SECONDS):
            alive = not alive
            _log.error("the engine %s", "came by again" if alive else f"did not come by for {_STALL_SECONDS:g} s")
            await rpc.set_alive(alive=alive)
        if trimmed_at <= scheduler.last_launch < now - _IDLE_SECONDS:
            trimmed_at = now
            trim()


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


async def _first(*awaitables: Awaitable[object]) -> None:
    """Return when one of them is done; cancel the others."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def _stop_on_signals() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; the second ends the process at once."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if stopping.is_set():
            sys.stderr.write("second signal, exiting at once\n")
            signal.raise_signal(signal.SIGKILL)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    return stopping
