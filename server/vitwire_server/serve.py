"""One server process from start to drained: load, serve, lame duck, stop."""

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from threading import Thread
from typing import TypeVar

from vitwire_server.loading import assemble
from vitwire_server.observe.http import MetricsServer
from vitwire_server.observe.metrics import Metrics
from vitwire_server.rpc.codec import Codec
from vitwire_server.rpc.server import Listen, RpcServer
from vitwire_server.rpc.service import Backend, EncoderService
from vitwire_server.scheduling.admission import Admission
from vitwire_server.scheduling.scheduler import Scheduler
from vitwire_server.settings import ServeSettings

_log = logging.getLogger(__name__)
T = TypeVar("T")
_MIB = 1 << 20
_COLUMNS_AT_MOST = 3 * 2 * 16 * 16 * 4
"""Bytes of the widest pixel row of any family, in float32."""


class EngineThread(Thread):
    """Runs the scheduler; tells the loop when it ended, and whether it failed."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(name="engine", daemon=True)
        self._scheduler = scheduler
        self._loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        self.failed = False

    def run(self) -> None:
        """Called by Thread.start."""
        try:
            self._scheduler.run()
        except Exception:  # noqa: BLE001 - the engine's loop: whatever it was, the process must end
            self.failed = True
            _log.exception("the engine stopped")
        self._loop.call_soon_threadsafe(self.ended.set)


async def serve(settings: ServeSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. A second signal ends at once.

    Raises CheckpointError, UsageError, or OSError if a port is taken.
    """
    stopping = _stop_on_signals()
    metrics = Metrics()
    service = EncoderService(metrics, Admission(settings.max_queued_items, settings.max_queued_bytes))
    pages = MetricsServer(
        metrics.registry,
        lambda: service.backend is not None and not stopping.is_set(),
        settings.metrics_host,
        settings.metrics_port,
    )
    rpc = RpcServer(
        service,
        max_message_bytes=settings.max_request_bytes or settings.max_patches_per_item * _COLUMNS_AT_MOST + _MIB,
        with_reflection=settings.reflection,
    )
    port = await rpc.start(Listen(settings.host, settings.port, settings.unix_socket))
    pages.start()
    print(f"listening on {settings.host}:{port}, metrics on {settings.metrics_host}:{pages.port}", flush=True)
    try:
        return await _until_stopped(settings, metrics, service, rpc, stopping)
    finally:
        await rpc.stop(0)
        pages.stop()


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
    assembly = loading.result()
    scheduler = Scheduler(assembly.engine, assembly.planner, metrics)
    engine = EngineThread(scheduler)
    engine.start()
    service.backend = Backend(assembly.card, Codec(assembly.card, assembly.tower.footprint), scheduler)
    await rpc.set_ready(ready=True)
    print(f"ready: {assembly.card.model_type} {assembly.card.model_id} on {assembly.card.device}", flush=True)
    await _first(stopping.wait(), engine.ended.wait())
    await rpc.set_ready(ready=False)
    if not engine.failed:
        _log.info("draining: not ready from now on, %g s of lame duck", settings.lame_duck_seconds)
        await _first(asyncio.sleep(settings.lame_duck_seconds), engine.ended.wait())
    if engine.failed:
        await rpc.set_alive(alive=False)
    await rpc.stop(settings.drain_seconds)
    scheduler.close()
    await engine.ended.wait()
    return int(engine.failed)


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
