"""Load a model: from settings to an engine that can encode."""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from vitwire_server.config.settings import MAX_MESSAGE_BYTES, ServeSettings, UsageError
from vitwire_server.core.budgets import Budget, Ladder, with_shorter
from vitwire_server.core.costs import ASSUMED, ASSUMED_ON_HOST, Costs
from vitwire_server.core.errors import EncoderError
from vitwire_server.core.items import DType, Item
from vitwire_server.core.models import Limits, ModelCard, Precision
from vitwire_server.core.plans import Fallback
from vitwire_server.observe.metrics import Metrics
from vitwire_server.observe.progress import progress
from vitwire_server.process.learning import beginning, memory_bound
from vitwire_server.process.precision import compute_dtype, fingerprint, reduce_precision
from vitwire_server.release import release
from vitwire_server.runtime.attention.selection import Selection, select
from vitwire_server.runtime.calibration import measure_costs, sample_items, worthwhile
from vitwire_server.runtime.compiling import HotShapes, compiled_blocks
from vitwire_server.runtime.devices import dtype_fault, kernel_fault, unavailable
from vitwire_server.runtime.engine import Engine
from vitwire_server.runtime.graphs import CudaRecorder, GraphSet, LiveRecorder, Recorder, SimulatedRecorder
from vitwire_server.runtime.learning import LadderLearner
from vitwire_server.runtime.live_capture import LiveCapture
from vitwire_server.runtime.outbox import Outbox
from vitwire_server.runtime.pinning import pin
from vitwire_server.runtime.staging import Stager
from vitwire_server.runtime.streams import CudaStreams, HostStreams, Streams
from vitwire_server.runtime.toolchain import cxx_fault, triton_fault
from vitwire_server.scheduling.planner import Bounds, Planner
from vitwire_server.sessions.arena import ArenaMemory
from vitwire_server.towers.checkpoints.checkpoint import Checkpoint, load_tower, open_checkpoint
from vitwire_server.towers.checkpoints.lora import Adapter
from vitwire_server.towers.files import CheckpointError
from vitwire_server.towers.tower import Tower

_log = logging.getLogger(__name__)
_MIB = 1 << 20
_OUTBOX_BYTES = 512 * _MIB
_FLOAT32_BYTES = 4
_POOL_BYTES_PER_VALUE = 20
"""Estimated bytes of a graph's intermediates per patch and hidden column; measured 20-25 KB per patch at 1152."""
_WARM_UP_TOKENS = 16
_DENSE = "sdpa"
"""The only backend for towers without segments."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to encode: its engine, its planner and its description."""

    engine: Engine
    planner: Planner
    card: ModelCard
    tower: Tower
    canary: Item
    """A small item that was encoded successfully."""
    outbox: Outbox | None
    """Device memory that rows are delivered from."""
    backends: Callable[[Ladder], Mapping[Budget, str]]
    """The attention backend of each budget of a ladder."""
    learner: LadderLearner | None
    """Fits the ladder to the loads."""


def load_model(
    settings: ServeSettings,
    metrics: Metrics,
    on_weights_loaded: Callable[[], None] = lambda: None,
    memory: ArenaMemory | None = None,
) -> LoadedModel:
    """Load the tower, capture its graphs and time them. Raises CheckpointError or UsageError.

    `on_weights_loaded` is called before capture; `memory` is where rows go. Everything runs on the caller's thread.
    """
    device = _device(settings.device)
    mode = _mode(settings.graphs, device)
    checkpoint = open_checkpoint(settings.model)
    preprocessing = checkpoint.preprocessing()
    dtype = compute_dtype(settings, checkpoint.dtype, device)
    if fault := dtype_fault(dtype, device):
        raise UsageError(f"--dtype {settings.dtype}: {fault}")
    _log.info("loading %s, with %d CPU threads for torch", checkpoint.folder, torch.get_num_threads())
    adapter = Adapter.read(*settings.adapter) if settings.adapter else None
    loaded = load_tower(checkpoint, dtype=dtype, device=device, track=progress, adapter=adapter)
    tower = loaded.tower
    on_weights_loaded()
    attention = _attention(settings, tower, captured=mode == "cuda")
    if memory and device.type == "cuda":
        memory.arena.touch(memory.kept)
        pin(memory.arena.view(0, memory.kept))
    streams: Streams = CudaStreams(device, memory) if device.type == "cuda" else HostStreams(memory)
    stager = Stager(tower.geometry, preprocessing, device)
    precision = _fused(settings, tower, attention, stager, streams)
    weights = fingerprint(loaded.fingerprint, precision)
    ladder, recorder = _ladder(settings, tower, mode), _recorder(mode, streams)
    completed = _completed(tower, attention)
    learning = beginning(settings, tower, checkpoint.folder, weights, ladder)
    with compiled_blocks(tower) if settings.compile == "on" and mode == "cuda" else nullcontext():
        graphs, taken = _capture(tower, completed(learning.ladder if learning else ladder), recorder, metrics)
    hot = HotShapes(tower).forward if not precision and _compiles(settings.compile, tower) else None
    outbox = Outbox(device, _OUTBOX_BYTES) if settings.nixl and device.type == "cuda" else None
    engine = Engine(tower, graphs, stager, streams, hot, outbox)
    canary = _warm_up(engine, tower)
    assumed = ASSUMED if device.type == "cuda" else ASSUMED_ON_HOST
    costs = _costs(settings, engine, tower, graphs) if mode == "cuda" else assumed
    metrics.ladder.in_use(graphs.ladder)
    backends = partial(_backends, attention)
    metrics.model.attends(backends(graphs.ladder))
    captured = {budget.tokens for budget in graphs.ladder}
    card = ModelCard(
        model_id=f"{checkpoint.model_id}+{adapter.name}" if adapter else checkpoint.model_id,
        model_type=checkpoint.family.model_type,
        fingerprint=weights,
        dtype=DType.of(str(dtype).removeprefix("torch.")),
        geometry=tower.geometry,
        preprocessing=preprocessing,
        ladder=graphs.ladder,
        dropped={budget.tokens: reason for budget, reason in graphs.dropped.items() if budget.tokens not in captured},
        limits=_limits(settings, tower),
        graphs=mode,
        attention=attention.name if attention else _DENSE,
        device=str(device),
        version=release(),
        backends=backends(graphs.ladder),
        unavailable=unavailable(device, attention.unused if attention else {}, graphs=mode != "off"),
        precision=precision,
    )
    _announce(checkpoint, card, metrics)
    bounds = Bounds(settings.max_budget_tokens, settings.max_items_per_batch, settings.max_frames_per_batch)
    reason = Fallback.OVERSIZE if graphs.dropped else Fallback.GRAPHS_OFF
    dropped = Ladder(tuple(sorted(graphs.dropped)))
    planner = Planner(graphs.ladder, bounds, without_graph=reason, dropped=dropped, costs=costs)
    learner = None
    if learning:
        bound = memory_bound(settings.graph_memory, taken)
        capture = LiveCapture(tower, engine, graphs, streams, recorder, completed, bound)
        learner = learning.learner(capture, planner, metrics.ladder)
    return LoadedModel(engine, planner, card, tower, canary, outbox, backends, learner)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def _mode(graphs: str, device: torch.device) -> str:
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


def _attention(settings: ServeSettings, tower: Tower, *, captured: bool) -> Selection | None:
    """Choose the attention backend; None for tile towers, which always use SDPA."""
    if not tower.segmented:
        if settings.attention_backend not in ("auto", _DENSE):
            raise UsageError(f"--attention-backend {settings.attention_backend}: tile towers support only {_DENSE}")
        return None
    try:
        selection = select(
            settings.attention_backend, tower.device, tower.dtype, *tower.attention_heads, captured=captured
        )
    except ValueError as error:
        raise UsageError(f"--attention-backend: {error}") from error
    tower.use_attention(selection.implementation)
    return selection


def _backends(attention: Selection | None, ladder: Ladder) -> dict[Budget, str]:
    """The attention backend of each budget's longest segments."""
    return {each: attention.at(each.max_segment_patches).name if attention else _DENSE for each in ladder}


def _fused(
    settings: ServeSettings, tower: Tower, attention: Selection | None, stager: Stager, streams: Streams
) -> Precision | None:
    """Reduce the precision if that is asked for, and fuse the blocks around their attention."""

    def finish() -> None:
        if attention and settings.compile == "auto" and tower.device.type == "cuda":
            _fuse(tower, attention, reduced=settings.precision == "fp8")

    if settings.precision == "fp8":
        return reduce_precision(tower, stager, streams, floor=settings.precision_floor, finish=finish)
    finish()
    return None


def _fuse(tower: Tower, attention: Selection, *, reduced: bool) -> None:
    if fault := kernel_fault(tower.device) or triton_fault():
        _log.warning("blocks are not fused, which is slower: %s", fault)
        return
    from vitwire_server.runtime.branches import hasten_mergers  # noqa: PLC0415 - triton comes with CUDA builds of torch
    from vitwire_server.runtime.fused_float8 import fuse_float8  # noqa: PLC0415 - as above
    from vitwire_server.runtime.fusion import fuse  # noqa: PLC0415 - as above
    from vitwire_server.runtime.positions import hasten_positions  # noqa: PLC0415 - as above

    fused = (fuse_float8 if reduced else fuse)(tower.blocks, attention)
    _log.info("%d of %d blocks fused", fused, len(tower.blocks))
    hasten_mergers(tower.model, tower.blocks)
    hasten_positions(tower.model)


def _compiles(setting: str, tower: Tower) -> bool:
    """Whether to compile frequent shapes: on CPU only, by default only for bfloat16, where it helps."""
    wanted = setting == "on" or (setting == "auto" and tower.dtype is torch.bfloat16)
    if not wanted or tower.device.type != "cpu":
        return False
    if fault := cxx_fault():
        _log.warning("frequent shapes are not compiled, which is slower: %s", fault)
    return not fault


def _ladder(settings: ServeSettings, tower: Tower, mode: str) -> Ladder:
    """The budgets of `--budgets`; with auto and learn, the tower's own that fit in `--graph-memory`."""
    if mode == "off":
        if settings.budgets != "auto":
            _log.warning("--budgets %s is ignored: graphs are off on %s", settings.budgets, tower.device)
        return Ladder()
    sizes = settings.budget_sizes
    if sizes is None:
        most = min(settings.max_budget_tokens, settings.graph_memory // _bytes_per_token(tower))
        sizes = tower.sizes(most)
    bounds = {"max_items": settings.max_items_per_batch, "max_frames": settings.max_frames_per_batch}
    budgets = {tower.budget(size, **bounds) for size in sizes}
    return Ladder(tuple(sorted(budgets)))


def _completed(tower: Tower, attention: Selection | None) -> Callable[[Ladder], Ladder]:
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


def _recorder(mode: str, streams: Streams) -> LiveRecorder:
    return CudaRecorder(streams.compute) if mode == "cuda" and isinstance(streams, CudaStreams) else SimulatedRecorder()


def _capture(tower: Tower, ladder: Ladder, recorder: Recorder, metrics: Metrics) -> tuple[GraphSet, int]:
    """The graphs, and the bytes that they take."""
    if len(ladder):
        _log.info("capturing %d budgets up to %d tokens", len(ladder), ladder.budgets[-1].tokens)
    start = time.perf_counter()
    before = torch.cuda.memory_reserved(tower.device) if tower.device.type == "cuda" else 0
    graphs = GraphSet(tower, ladder, recorder, lambda budgets: progress(budgets, "capturing", len(ladder)))
    reserved = torch.cuda.memory_reserved(tower.device) - before if tower.device.type == "cuda" else graphs.nbytes
    metrics.model.captured(len(graphs.dropped), time.perf_counter() - start, reserved)
    return graphs, reserved


def _costs(settings: ServeSettings, engine: Engine, tower: Tower, graphs: GraphSet) -> Costs:
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


def _limits(settings: ServeSettings, tower: Tower) -> Limits:
    """Limits of requests; by default a message may be as large as the largest item in float32."""
    columns = tower.geometry.columns(frames=tower.geometry.temporal)
    largest = settings.max_patches_per_item * columns * _FLOAT32_BYTES + _MIB
    return Limits(
        request_bytes=settings.max_request_bytes or min(largest, MAX_MESSAGE_BYTES),
        items_per_request=settings.max_items_per_request,
        patches_per_item=settings.max_patches_per_item,
        queued_items=settings.max_queued_items,
        queued_bytes=settings.max_queued_bytes,
    )


def _warm_up(engine: Engine, tower: Tower) -> Item:
    """Run one eager forward, so that no request pays for lazy initialisation; returns its item.

    Raises CheckpointError if the rows do not have the shape that the configuration says.
    """
    (item,) = sample_items(tower, tower.samples(_WARM_UP_TOKENS, 1))
    (result,) = engine.launch([item], None).collect().results
    if isinstance(result, EncoderError):
        raise CheckpointError(f"the warm-up forward failed: {result}")
    expected = (item.footprint.rows, tower.geometry.width)
    if result.shape != expected:
        raise CheckpointError(f"the tower returns rows of shape {result.shape}, its configuration says {expected}")
    return item


def _announce(checkpoint: Checkpoint, card: ModelCard, metrics: Metrics) -> None:
    metrics.model.loaded(
        card.fingerprint,
        model=card.model_id,
        model_type=card.model_type,
        dtype=card.dtype.label,
        device=card.device,
        graphs=card.graphs,
        attention=card.attention,
        similarity=card.precision.similarity if card.precision else 1.0,
    )
    loaded = (checkpoint.folder, card.model_type, card.dtype.label, card.device, len(card.ladder))
    _log.info("loaded %s (%s) in %s on %s, %d graphs", *loaded)
