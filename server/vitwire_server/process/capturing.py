"""Which graphs a model has, and their capture: the ladder, what records it, and what replays cost."""

import logging
import time
from collections.abc import Callable
from functools import partial

import torch

from vitwire_server.config.settings import ServeSettings, UsageError
from vitwire_server.core.budgets import Ladder, with_shorter
from vitwire_server.core.costs import Costs
from vitwire_server.observe.metrics import Metrics
from vitwire_server.observe.progress import progress
from vitwire_server.runtime.attention.selection import Selection
from vitwire_server.runtime.devices import kernel_fault, memory
from vitwire_server.runtime.engine import Engine
from vitwire_server.runtime.graphs import CudaRecorder, GraphSet, Recorder, SimulatedRecorder
from vitwire_server.runtime.ladders.calibration import measure_costs, worthwhile
from vitwire_server.runtime.memory.streams import CudaStreams, Streams
from vitwire_server.towers.tower import Tower

_log = logging.getLogger(__name__)
_POOL_BYTES_PER_VALUE = 20
"""Estimated bytes of a graph's intermediates per patch and hidden column; measured 20-25 KB per patch at 1152."""


def graph_mode(graphs: str, device: torch.device) -> str:
    """cuda, simulated or off."""
    if graphs == "cuda" and device.type != "cuda":
        raise UsageError(
            f"--graphs cuda: {device} has no CUDA graphs; use a CUDA device, or --graphs simulated for tests"
        )
    if graphs != "auto":
        return graphs
    if device.type == "cuda" and (fault := kernel_fault(device)):
        _log.warning("--graphs auto: graphs are off: %s", fault)
        return "off"
    return "cuda" if device.type == "cuda" else "off"


def holding_an_image(settings: ServeSettings, tower: Tower) -> ServeSettings:
    """The settings, with the default of `--max-budget-tokens` raised to the smallest budget of the tower."""
    least = tower.budget(1, max_items=1, max_frames=settings.max_frames_per_batch).tokens
    if "max_budget_tokens" in settings.model_fields_set or least <= settings.max_budget_tokens:
        return settings
    _log.info("--max-budget-tokens is %d, one image of this model; more lets images share a forward", least)
    return settings.model_copy(update={"max_budget_tokens": least})


def default_ladder(settings: ServeSettings, tower: Tower, mode: str) -> Ladder:
    """The budgets of `--budgets`; with auto and learn, the tower's own that fit in `--graph-memory`."""
    if mode == "off":
        if settings.budgets != "auto":
            _log.warning("--budgets %s is ignored: graphs are off on %s", settings.budgets, tower.device)
        return Ladder()
    sizes = settings.budget_sizes
    bounds = {"max_items": settings.max_items_per_batch, "max_frames": settings.max_frames_per_batch}
    if sizes is None:
        room = settings.graph_memory // _bytes_per_token(tower)
        sizes = tower.sizes(min(settings.max_budget_tokens, room))
        if not sizes:
            least = tower.budget(1, **bounds).tokens
            _log.warning(
                "no graphs: the smallest budget of this model has %d tokens, but --max-budget-tokens is %d, and "
                "--graph-memory is enough for about %d; raise the smaller one",
                least,
                settings.max_budget_tokens,
                room,
            )
    budgets = {tower.budget(size, **bounds) for size in sizes}
    return Ladder(tuple(sorted(budgets)))


def completed_by(tower: Tower, attention: Selection | None) -> Callable[[Ladder], Ladder]:
    """Adds budgets for short segments to a ladder."""

    def completed(ladder: Ladder) -> Ladder:
        return with_shorter(ladder, attention.shorter, merge=tower.geometry.merge) if attention else ladder

    return completed


def _bytes_per_token(tower: Tower) -> int:
    """Estimated memory per token of the largest budget: static buffers and the shared pool."""
    geometry = tower.geometry
    heads, head_dim = tower.attention_heads
    columns = geometry.columns(frames=geometry.temporal)
    patch = columns * tower.dtype.itemsize + heads * head_dim * _POOL_BYTES_PER_VALUE
    return geometry.merge**2 * patch + geometry.width * tower.dtype.itemsize


def recorder_of(mode: str, streams: Streams) -> Recorder:
    return CudaRecorder(streams.compute) if mode == "cuda" and isinstance(streams, CudaStreams) else SimulatedRecorder()


def capture_ladder(tower: Tower, ladder: Ladder, recorder: Recorder, metrics: Metrics) -> tuple[GraphSet, int]:
    """The graphs, and the bytes that they take."""
    if len(ladder):
        _log.info("capturing %d budgets up to %d tokens", len(ladder), ladder.budgets[-1].tokens)
    start = time.perf_counter()
    on_cuda = tower.device.type == "cuda"
    before = torch.cuda.memory_reserved(tower.device) if on_cuda else 0
    graphs = GraphSet(tower, ladder, recorder, lambda budgets: progress(budgets, "capturing", len(ladder)))
    reserved = torch.cuda.memory_reserved(tower.device) - before if on_cuda else graphs.nbytes
    if on_cuda:
        metrics.memory.reads(partial(memory, tower.device, reserved))
    metrics.model.captured(len(graphs.dropped), time.perf_counter() - start, reserved)
    return graphs, reserved


def timed_costs(settings: ServeSettings, engine: Engine, tower: Tower, graphs: GraphSet) -> Costs:
    """Time all budgets; those for short segments that are not faster are dropped."""
    start = time.perf_counter()
    costs = measure_costs(engine, tower, graphs.ladder, settings.max_budget_tokens, settings.max_items_per_batch)
    _log.info(
        "timed %d budgets in %.1f s; an eager forward takes %.2f ms + %.2f us per token of the device, at least "
        "%.2f ms, and %.2f ms of the host; a replay takes %.2f ms of the host",
        len(costs.measured),
        time.perf_counter() - start,
        1e3 * costs.eager_fixed,
        1e6 * costs.eager_token,
        1e3 * costs.eager_floor,
        1e3 * costs.eager_host,
        1e3 * costs.replay_host,
    )
    graphs.keep(worthwhile(graphs.ladder, costs))
    return costs
