"""The second step: the graphs of a placed tower, on the ladder of `--budgets` or the one learned before."""

import errno
import logging
import os
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import gettempdir

import torch

from vitwire_server.assembling.placing import Placed
from vitwire_server.config.model_flags import GraphSettings
from vitwire_server.core.budgets import Ladder
from vitwire_server.core.capacities import CropCapacities
from vitwire_server.core.costs import ASSUMED, ASSUMED_ON_HOST, Costs
from vitwire_server.core.reports import LadderMonitor
from vitwire_server.fitting.learned import Demands, Learned, StateFile
from vitwire_server.observe.metrics import Metrics
from vitwire_server.runtime.devices import memory
from vitwire_server.runtime.engine import Engine
from vitwire_server.runtime.graphs import CudaRecorder, GraphSet, Recorder, SimulatedRecorder
from vitwire_server.runtime.ladders.calibration import measure_costs, worthwhile
from vitwire_server.runtime.ladders.learning import LadderLearner
from vitwire_server.runtime.ladders.live_capture import LiveCapture
from vitwire_server.runtime.memory.streams import CudaStreams
from vitwire_server.scheduling.planner import Bounds, Planner
from vitwire_server.towers.tower import Tower

_log = logging.getLogger(__name__)
_POOL_BYTES_PER_VALUE = 20
"""Estimated bytes of a graph's intermediates per patch and hidden column; measured 20-25 KB per patch at 1152."""
_LEAST_ROOM = 64 << 20
"""Bytes that the graphs may grow by even if those at the start took all of `--graph-memory`."""


@dataclass(frozen=True, slots=True)
class Learning:
    """The ladder that `--budgets learn` starts with, and what it comes from."""

    ladder: Ladder
    default: Ladder
    demands: Demands
    file: StateFile
    learned: Learned | None

    def learner(self, capture: LiveCapture, planner: Planner, monitor: LadderMonitor) -> LadderLearner | None:
        """Adapts the ladder of `planner` to the loads; None if no captured budget could be changed."""
        most = planner.ladder.largest.tokens if planner.ladder.largest else 0
        captured = Ladder(tuple(budget for budget in self.default if budget.tokens <= most))
        if captured.largest is None:
            return None
        demands = replace(self.demands, largest=captured.largest.tokens, completed=capture.completed)
        return LadderLearner(capture, planner, demands, captured, monitor, keep=self.file.write, learned=self.learned)


@dataclass(frozen=True, slots=True)
class Captured:
    """A placed tower and its graphs."""

    placed: Placed
    bounds: Bounds
    graphs: GraphSet
    recorder: Recorder
    nbytes: int
    """Bytes that the graphs take."""
    learning: Learning | None

    def learner(self, planner: Planner, monitor: LadderMonitor) -> LadderLearner | None:
        """Fits the ladder of `planner` to the loads; None if no captured budget could be changed."""
        if self.learning is None:
            return None
        placed = self.placed
        room = max(_LEAST_ROOM, placed.settings.graph_memory - self.nbytes)
        capture = LiveCapture(placed.tower, self.graphs, placed.streams, self.recorder, placed.completed, room)
        return self.learning.learner(capture, planner, monitor)

    def timed(self, engine: Engine) -> Costs:
        """Time all budgets; those for short segments that are not faster are dropped. Assumed without CUDA graphs."""
        device = self.placed.tower.device
        if self.placed.mode != "cuda":
            return ASSUMED if device.type == "cuda" else ASSUMED_ON_HOST
        start = time.perf_counter()
        costs = measure_costs(engine, self.placed.tower, self.graphs.ladder, self.bounds.tokens, self.bounds.items)
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
        self.graphs.keep(worthwhile(self.graphs.ladder, costs))
        return costs


def capture(placed: Placed, metrics: Metrics) -> Captured:
    """Capture a graph for each budget. Raises UsageError."""
    tower, settings = placed.tower, placed.settings
    bounds = bounds_of(settings, tower)
    ladder = default_ladder(settings, bounds, tower, placed.mode)
    learning = learning_of(settings, bounds, tower, placed.fingerprint, ladder)
    ladder = placed.completed(learning.ladder if learning else ladder)
    if len(ladder):
        _log.info("capturing %d budgets up to %d tokens", len(ladder), ladder.budgets[-1].tokens)
    start = time.perf_counter()
    on_cuda = tower.device.type == "cuda"
    before = torch.cuda.memory_reserved(tower.device) if on_cuda else 0
    recorder = _recorder(placed)
    graphs = GraphSet(tower, ladder, recorder)
    reserved = torch.cuda.memory_reserved(tower.device) - before if on_cuda else graphs.nbytes
    if on_cuda:
        metrics.memory.reads(partial(memory, tower.device, reserved))
    metrics.model.captured(len(graphs.dropped), time.perf_counter() - start, reserved)
    return Captured(placed, bounds, graphs, recorder, reserved, learning)


def _recorder(placed: Placed) -> Recorder:
    streams = placed.streams
    if placed.mode == "cuda" and isinstance(streams, CudaStreams):
        return CudaRecorder(streams.compute)
    return SimulatedRecorder()


def bounds_of(settings: GraphSettings, tower: Tower) -> Bounds:
    """The bounds of a batch, with the default of `--max-budget-tokens` raised to the smallest budget of the tower."""
    bounds = Bounds(settings.max_budget_tokens, settings.max_items_per_batch, settings.max_frames_per_batch)
    least = tower.budget(1, max_items=1, max_frames=bounds.frames).tokens
    if "max_budget_tokens" in settings.given or least <= bounds.tokens:
        return bounds
    _log.info("--max-budget-tokens is %d, one image of this model; more lets images share a forward", least)
    return replace(bounds, tokens=least)


def default_ladder(settings: GraphSettings, bounds: Bounds, tower: Tower, mode: str) -> Ladder:
    """The budgets of `--budgets`; with auto and learn, the tower's default ones that fit in `--graph-memory`."""
    if mode == "off":
        if settings.budget_sizes or settings.must_learn:
            _log.warning("--budgets %s is ignored: graphs are off on %s", settings.budgets, tower.device)
        return Ladder()
    sizes = settings.budget_sizes
    if sizes is None:
        room = settings.graph_memory // _bytes_per_token(tower)
        sizes = tower.sizes(min(bounds.tokens, room))
        if not sizes:
            _log.warning(
                "no graphs: the smallest budget of this model has %d tokens, but --max-budget-tokens is %d, and "
                "--graph-memory is enough for about %d; raise the smaller one",
                tower.budget(1, max_items=bounds.items, max_frames=bounds.frames).tokens,
                bounds.tokens,
                room,
            )
    budgets = {tower.budget(size, max_items=bounds.items, max_frames=bounds.frames) for size in sizes}
    return Ladder(tuple(sorted(budgets)))


def _bytes_per_token(tower: Tower) -> int:
    """Estimated memory per token of the largest budget: static buffers and the shared pool."""
    geometry = tower.geometry
    heads, head_dim = tower.attention_heads
    columns = geometry.columns(frames=geometry.temporal)
    patch = columns * tower.dtype.itemsize + heads * head_dim * _POOL_BYTES_PER_VALUE
    return geometry.merge**2 * patch + geometry.width * tower.dtype.itemsize


def learning_of(
    settings: GraphSettings, bounds: Bounds, tower: Tower, fingerprint: str, default: Ladder
) -> Learning | None:
    """The ladder learned before, or else `default`; None if nothing can be learned. Raises UsageError."""
    if not settings.learns or default.largest is None:
        return None
    if isinstance(tower.capacities, CropCapacities):
        if settings.must_learn:
            _log.warning("--budgets learn has no effect: the default ladder has all budgets that this model can have")
        return None
    largest = default.largest.tokens
    device = torch.cuda.get_device_name(tower.device) if tower.device.type == "cuda" else "cpu"
    folder = settings.state_dir or _kernel_folder()
    if not settings.state_dir:
        try:
            check_state_dir(folder)
        except OSError as error:
            _log.warning("learned budgets will not be kept over a restart unless --state-dir is set: %s", error)
    file = StateFile.in_folder(folder, fingerprint, device, largest)
    learned = file.read()
    demands = Demands(tower.capacities, largest, max_items=bounds.items, max_frames=bounds.frames)
    sizes = learned.sizes if learned else [budget.tokens for budget in default]
    ladder = Ladder(tuple(sorted({demands.budget(size) for size in sizes})))
    return Learning(ladder, default, demands, file, learned)


def _kernel_folder() -> Path:
    """Where Triton keeps what it compiled: the choices of products are there too."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")  # noqa: PTH111 - Path raises without a home
    if not os.path.isabs(home):  # noqa: PTH117 - as above
        home = gettempdir()
    return Path(os.environ.get("TRITON_CACHE_DIR") or f"{home}/.triton/cache")


def check_state_dir(folder: Path) -> None:
    """Raises OSError if what is learned cannot be kept in this folder, which is made if there is none."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, "it cannot be written", str(folder))
