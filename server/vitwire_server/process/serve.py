"""One server process: load the model, serve, drain, stop."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from vitwire.shared.agents import MISSING, AgentError, is_installed
from vitwire.shared.garbage import exempt_loaded
from vitwire_server.assembling.capturing import check_state_dir
from vitwire_server.assembling.loading import LoadedModel, load_model
from vitwire_server.caching.cache import EmbeddingCache
from vitwire_server.caching.downloads import Downloads
from vitwire_server.caching.single_flight import SingleFlight
from vitwire_server.config.host import rpc_processes
from vitwire_server.config.service_flags import LimitSettings
from vitwire_server.config.settings import ServeSettings, UsageError
from vitwire_server.core.budgets import Ladder
from vitwire_server.core.health import Health, State
from vitwire_server.core.models import ModelCard
from vitwire_server.delivery.courier import Courier
from vitwire_server.delivery.cuda import CudaError
from vitwire_server.delivery.transfers import Bounds
from vitwire_server.fitting.traces import TraceWriter
from vitwire_server.observe.http import MetricsServer
from vitwire_server.observe.logs import plain_line
from vitwire_server.observe.metrics import Metrics
from vitwire_server.observe.metrics.edges import EdgeMetrics
from vitwire_server.process import file_decoding
from vitwire_server.process.edge_front import EdgeFront
from vitwire_server.process.front import LocalFront
from vitwire_server.process.hanging_files import in_daemon_thread, read_at_start
from vitwire_server.process.http_front import HttpFront, reachable
from vitwire_server.process.lifecycle import EngineThread, Lifecycle
from vitwire_server.process.system import metrics_connections, on_signals, raise_limit
from vitwire_server.rpc.server import bracketed
from vitwire_server.runtime.ladders.learning import LadderLearner
from vitwire_server.runtime.memory.outbox import Outbox
from vitwire_server.scheduling.admission import Admission
from vitwire_server.scheduling.canary import Canary
from vitwire_server.scheduling.intake import Intake
from vitwire_server.scheduling.scheduler import Scheduler
from vitwire_server.sessions.arena import Arena, ArenaMemory, PrivateMemory
from vitwire_server.sessions.local import LocalSessions
from vitwire_server.towers.files import CheckpointError

_log = logging.getLogger(__name__)
_EXIT_SECONDS = 10.0
_KEPT_BYTES = 1 << 30
"""Shared memory that is kept, and pinned on CUDA, for pixels and rows."""


async def serve(settings: ServeSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. A second signal kills the process.

    Raises CheckpointError, UsageError, or OSError if a port is taken.
    """
    signals = _stop_on_signals(settings.log_format)
    raise_limit()
    if settings.nixl and not is_installed():
        raise UsageError(f"--nixl: {MISSING}")
    if settings.device in ("auto", "cuda"):
        on_cuda = settings.device == "cuda" or torch.cuda.is_available()
        settings = replace(settings, device="cuda:0" if on_cuda else "cpu")
    health = Health()
    metrics = Metrics(health)
    metrics.admission.limits(settings.max_queued_items, settings.max_queued_bytes)
    if settings.learns and settings.state_dir:
        await read_at_start("--state-dir", partial(check_state_dir, settings.state_dir))
    async with AsyncExitStack() as stack:
        trace = None
        if settings.record_trace:
            trace = await read_at_start("--record-trace", partial(TraceWriter, settings.record_trace))
            stack.callback(trace.close)
        if settings.http_port is not None:
            settings = reachable(settings, Path(stack.enter_context(TemporaryDirectory(prefix="vitwire-"))))
        edges = rpc_processes(settings.rpc_process_count, cuda_devices=int(settings.device != "cpu"))
        memory = _shared_memory(settings) if edges > 1 else None
        registry = metrics.registry
        if memory:
            edge_metrics = EdgeMetrics(registry)
            front: LocalFront | EdgeFront = EdgeFront(settings, health, memory, edge_metrics, metrics.processes, edges)
            registry = edge_metrics.registry
        else:
            front = LocalFront(settings, metrics.rpc, health)
        stack.push_async_callback(front.stop)
        pages = None
        if settings.metrics:
            pages_at = settings.metrics_host, settings.metrics_port
            pages = MetricsServer(registry, health, *pages_at, metrics_connections())
            stack.callback(pages.stop)
        port = await front.start()
        if pages:
            pages.start()
        metrics_at = f"on {bracketed(settings.metrics_host)}:{pages.port}" if pages else "off"
        _print(plain_line(f"listening on {bracketed(settings.host)}:{port}, metrics {metrics_at}", settings.log_format))
        http = None
        if settings.http_port is not None:
            http = HttpFront(settings)
            stack.push_async_callback(http.stop, 0)
            await http.started(signals[0])
            _print(plain_line(f"HTTP on {bracketed(settings.http_host)}:{http.port}", settings.log_format))
        lifecycle = Lifecycle(health, front.show)
        return await _Server(settings, metrics, front, http, lifecycle, memory, trace, *signals).run()


@dataclass(frozen=True, slots=True)
class _Server:
    """A server process that listens."""

    settings: ServeSettings
    metrics: Metrics
    front: LocalFront | EdgeFront
    http: HttpFront | None
    lifecycle: Lifecycle
    memory: ArenaMemory | None
    trace: TraceWriter | None
    stopping: asyncio.Event
    by_hand: asyncio.Event
    """Set by Ctrl-C: nobody balances load over servers that are stopped by hand, so they stop at once."""

    async def run(self) -> int:
        """Load the model, serve, drain; returns the exit code."""
        settings, front = self.settings, self.front
        courier = await asyncio.to_thread(self._courier)
        decoding = asyncio.create_task(file_decoding.all_decoded_on(settings))
        watching_front = asyncio.create_task(_any_of(front.watch(), *([self.http.watch()] if self.http else [])))
        model = await self._loaded(watching_front)
        if model is None:
            return int(watching_front.done())
        (batch,) = model.planner.plan([model.canary.footprint]).batches
        canary = Canary(model.canary, batch, settings.canary_seconds)
        scheduler = Scheduler(model.engine, model.planner, self.metrics.engine, canary=canary, learner=model.learner)
        engine = EngineThread(scheduler)
        engine.start()
        if courier and model.outbox:
            await asyncio.to_thread(_add_outbox, courier, model.outbox, keep=settings.stored_bytes > 0)
        jpegs, films = await decoding
        card = replace(model.card, nixl=courier is not None, decoding=jpegs, clip_decoding=films)
        card = file_decoding.described(card, settings)
        self.metrics.model.described(card)
        exempt_loaded(_log)
        front.serve(card, model.tower.footprint, self._sessions(card, scheduler.intake, courier))
        await _any_of(front.prepared(), self.stopping.wait(), engine.ended.wait(), asyncio.shield(watching_front))
        if model.learner:
            self._show_ladders(model, model.learner, card)
        await self.lifecycle.set_state(State.SERVING)
        names = " ".join(dict.fromkeys((card.model_type, card.model_id)))  # a folder may be named after the type
        _print(plain_line(f"ready: {names} on {card.device}", settings.log_format))
        watching = asyncio.create_task(self.lifecycle.watch_engine(scheduler, settings.wedge_seconds))
        await _any_of(self.stopping.wait(), engine.ended.wait(), asyncio.shield(watching_front))
        watching.cancel()
        failed = await self._drain(engine, watching_front)
        if courier:
            await asyncio.to_thread(courier.close)
        scheduler.intake.close()
        await _any_of(engine.ended.wait(), asyncio.sleep(_EXIT_SECONDS))
        return int(engine.failed or failed)

    async def _loaded(self, watching_front: asyncio.Task[None]) -> LoadedModel | None:
        """The model; None if the server is to stop before it is loaded."""
        settings, ready = self.settings, self.lifecycle.weights_loaded_threadsafe
        loading = in_daemon_thread(lambda: load_model(settings, self.metrics, ready, self.memory), "loading")
        await _any_of(loading, self.stopping.wait(), asyncio.shield(watching_front))
        if loading.cancelled():
            return None
        try:
            return loading.result()
        except (CheckpointError, UsageError):
            raise
        except Exception as error:  # a broken file may fail in any way
            _log.debug("loading failed", exc_info=True)
            raise CheckpointError(
                f"{settings.model} cannot be served (--log-level debug shows where): {error!r}"
            ) from error

    async def _drain(self, engine: EngineThread, watching_front: asyncio.Task[None]) -> bool:
        """Answer what is in flight and close the ports; whether RPCs could not be served any more."""
        settings = self.settings
        if not engine.ended.is_set():
            await self.lifecycle.start_draining()
            seconds = 0.0 if self.by_hand.is_set() else settings.lame_duck_seconds
            _log.info("draining: readiness is off; serving for another %g s", seconds)
            await _any_of(asyncio.sleep(settings.lame_duck_seconds), engine.ended.wait(), self.by_hand.wait())
        if engine.ended.is_set():
            await self.lifecycle.set_state(State.FAILED, "the engine stopped")
        failed = watching_front.done()
        watching_front.cancel()
        if self.http:  # first, as its requests need RPCs
            await self.http.stop(settings.drain_seconds / 2)
        await self.front.drain(settings.drain_seconds / (2 if self.http else 1))
        await self.front.stop()
        return failed

    def _show_ladders(self, model: LoadedModel, learner: LadderLearner, card: ModelCard) -> None:
        """Let GetModel and the metrics show the ladder in use."""
        loop = asyncio.get_running_loop()

        def show(ladder: Ladder) -> None:
            backends = model.backends(ladder)
            self.metrics.model.attends(backends)
            with suppress(RuntimeError):  # the loop is closed: the process is about to exit
                loop.call_soon_threadsafe(self.front.describe, replace(card, ladder=ladder, backends=backends))

        learner.on_change = show

    def _courier(self) -> Courier | None:
        """None without --nixl. Raises UsageError."""
        if not self.settings.nixl:
            return None
        try:
            return Courier(self.metrics.delivery, Bounds(seconds=self.settings.nixl_seconds))
        except AgentError as error:
            raise UsageError(f"--nixl: {error}") from error

    def _sessions(self, card: ModelCard, intake: Intake, courier: Courier | None) -> LocalSessions:
        settings, metrics = self.settings, self.metrics
        admission = Admission(settings.max_queued_items, settings.max_queued_bytes, metrics.admission.changed)
        cache = EmbeddingCache(
            settings.cache_bytes,
            metrics.cache.changed,
            max_stored=settings.stored_bytes,
            download=Downloads(metrics.cache.downloaded).start,
        )
        engine = card, intake, admission, SingleFlight(cache, metrics.cache), metrics.admission
        return LocalSessions(*engine, self.memory or PrivateMemory(), self.trace, courier)


def _add_outbox(courier: Courier, outbox: Outbox, *, keep: bool) -> None:
    """Deliver rows from the outbox as well, and from now on `keep` those there that are only stored."""
    if outbox.is_shared:
        try:
            courier.add_device(outbox.memory, outbox.exported(), outbox.uploaded)
        except (AgentError, CudaError) as error:
            _log.warning("embeddings are not delivered to clients' devices: %s", error)
            return
    outbox.keeps = keep


def _shared_memory(settings: LimitSettings) -> ArenaMemory:
    """Memory for the pixels and rows of all processes. Admission bounds what is used of it, in whatever order.

    Raises UsageError.
    """
    nbytes = 2 * (settings.max_queued_bytes + settings.message_bytes)
    try:
        arena = Arena.create(nbytes)
    except OSError as error:
        raise UsageError(f"--max-queued-bytes: the processes cannot share {nbytes} bytes: {error.strerror}") from error
    return ArenaMemory(arena, kept=min(_KEPT_BYTES, settings.max_queued_bytes))


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


def _stop_on_signals(log_format: str) -> tuple[asyncio.Event, asyncio.Event]:
    """An event that the first signal sets, and one that it sets too if it is SIGINT; the second kills the process."""
    stopping, by_hand = asyncio.Event(), asyncio.Event()

    def stop(number: signal.Signals) -> None:
        stopping.set()
        if number is signal.SIGINT:
            by_hand.set()

    def kill() -> None:
        sys.stderr.write(plain_line("second signal: exiting now", log_format, "warning") + "\n")
        signal.raise_signal(signal.SIGKILL)

    on_signals(stop, kill)
    return stopping, by_hand
