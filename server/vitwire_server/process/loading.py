"""Load a model: from settings to an engine that can encode."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from vitwire_server.config.service_flags import MAX_MESSAGE_BYTES, DeliverySettings
from vitwire_server.config.settings import ServeSettings, UsageError
from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.costs import ASSUMED, ASSUMED_ON_HOST
from vitwire_server.core.errors import EncoderError
from vitwire_server.core.items import DType, Item, Modality
from vitwire_server.core.models import Limits, ModelCard, Preprocessing
from vitwire_server.core.plans import Fallback
from vitwire_server.core.pooling import Pooling
from vitwire_server.observe.metrics import Metrics
from vitwire_server.observe.progress import progress
from vitwire_server.process.capturing import (
    beginning,
    bounds_of,
    capture_ladder,
    default_ladder,
    graph_mode,
    recorder_of,
    timed_costs,
)
from vitwire_server.process.computing import (
    DENSE,
    backends_of,
    chosen_attention,
    fuse_blocks,
    preparation_of,
)
from vitwire_server.release import release
from vitwire_server.runtime.attention.selection import Selection
from vitwire_server.runtime.devices import dtype_fault, unavailable
from vitwire_server.runtime.engine import Engine
from vitwire_server.runtime.graphs import GraphSet
from vitwire_server.runtime.ladders.calibration import sample_items
from vitwire_server.runtime.ladders.learning import LadderLearner
from vitwire_server.runtime.ladders.live_capture import LiveCapture
from vitwire_server.runtime.memory.outbox import Outbox
from vitwire_server.runtime.memory.streams import CudaStreams, HostStreams, Streams, pin
from vitwire_server.runtime.staging import Stager
from vitwire_server.scheduling.planner import Planner
from vitwire_server.sessions.arena import ArenaMemory
from vitwire_server.towers.checkpoints.checkpoint import Checkpoint, load_tower, open_checkpoint
from vitwire_server.towers.checkpoints.lora import Adapter
from vitwire_server.towers.files import CheckpointError
from vitwire_server.towers.tower import Tower

_log = logging.getLogger(__name__)
_MIB = 1 << 20
_FLOAT32_BYTES = 4
_WARM_UP_TOKENS = 16
_LEAST_ROOM = 64 << 20
"""Bytes that the graphs may grow by even if those at the start took all of `--graph-memory`."""
_PASSING_BYTES = 512 << 20
"""Room for rows on their way to clients, for new ones, and for those that move to the host."""


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
    """Memory that rows are delivered from."""
    backends: Callable[[Ladder], Mapping[Budget, str]]
    """The attention backend of each budget of a ladder."""
    learner: LadderLearner | None
    """Fits the ladder to the loads."""


@dataclass(frozen=True, slots=True)
class Computing:
    """A tower on its device that computes as the settings say; it has no graphs yet."""

    checkpoint: Checkpoint
    model_id: str
    preprocessing: Mapping[Modality, Preprocessing]
    tower: Tower
    dtype: torch.dtype
    fingerprint: str
    attention: Selection | None
    stager: Stager
    streams: Streams


def load_model(
    settings: ServeSettings,
    metrics: Metrics,
    on_weights_loaded: Callable[[], None] = lambda: None,
    memory: ArenaMemory | None = None,
) -> LoadedModel:
    """Load the tower, capture its graphs and time them. Raises CheckpointError or UsageError.

    `on_weights_loaded` is called before capture; `memory` is where rows go. Everything runs on the caller's thread.
    """
    device = device_of(settings.device)
    mode = graph_mode(settings.graphs, device)
    computing = placed_tower(settings, device, on_weights_loaded, memory, captured=mode == "cuda")
    checkpoint, tower = computing.checkpoint, computing.tower
    attention, streams = computing.attention, computing.streams
    bounds = bounds_of(settings, tower)
    ladder, recorder = default_ladder(settings, bounds, tower, mode), recorder_of(mode, streams)

    def completed(ladder: Ladder) -> Ladder:
        return attention.completed(ladder, merge=tower.geometry.merge) if attention else ladder

    learning = beginning(settings, bounds, tower, computing.fingerprint, ladder)
    graphs, taken = capture_ladder(tower, completed(learning.ladder if learning else ladder), recorder, metrics)
    outbox = _outbox(settings, device)
    recipes, preparation = preparation_of(settings, tower, computing.preprocessing)
    engine = Engine(tower, graphs, computing.stager, streams, outbox, recipes)
    canary = _warm_up(engine, tower)
    costs = ASSUMED if device.type == "cuda" else ASSUMED_ON_HOST
    if mode == "cuda":
        costs = timed_costs(bounds, engine, tower, graphs)
    metrics.ladder.in_use(graphs.ladder)
    backends = partial(backends_of, attention)
    metrics.model.attends(backends(graphs.ladder))
    card = replace(_card(settings, computing, graphs, mode), preparation=preparation)
    _announce(checkpoint, card, metrics)
    reason = Fallback.OVERSIZE if graphs.dropped else Fallback.GRAPHS_OFF
    dropped = Ladder(tuple(sorted(graphs.dropped)))
    planner = Planner(graphs.ladder, bounds, without_graph=reason, dropped=dropped, costs=costs)
    learner = None
    if learning:
        room = max(_LEAST_ROOM, settings.graph_memory - taken)
        capture = LiveCapture(tower, graphs, streams, recorder, completed, room)
        learner = learning.learner(capture, planner, metrics.ladder)
    return LoadedModel(engine, planner, card, tower, canary, outbox, backends, learner)


def placed_tower(
    settings: ServeSettings,
    device: torch.device,
    on_weights_loaded: Callable[[], None] = lambda: None,
    memory: ArenaMemory | None = None,
    *,
    captured: bool,
) -> Computing:
    """Load the tower, and choose how it computes. Raises CheckpointError or UsageError."""
    checkpoint = open_checkpoint(settings.model)
    try:
        checkpoint = checkpoint.pooled(Pooling(settings.pooling))
    except ValueError as error:
        raise UsageError(f"--pooling {settings.pooling}: {error}") from error
    preprocessing = checkpoint.preprocessing()
    dtype: torch.dtype = checkpoint.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
    if fault := dtype_fault(dtype, device):
        raise UsageError(f"--dtype {settings.dtype}: {fault}")
    _log.info("loading %s, with %d CPU threads for torch", checkpoint.folder, torch.get_num_threads())
    adapter = Adapter.read(*settings.adapter) if settings.adapter else None
    loaded = load_tower(checkpoint, dtype=dtype, device=device, track=progress, adapter=adapter)
    on_weights_loaded()
    tower = loaded.tower
    attention = chosen_attention(settings, tower, captured=captured)
    if memory and device.type == "cuda":
        memory.arena.touch(memory.kept)
        pin(memory.arena.view(0, memory.kept))
    streams: Streams = CudaStreams(device, memory) if device.type == "cuda" else HostStreams(memory)
    stager = Stager(tower.geometry, preprocessing, device)
    fuse_blocks(tower, attention)
    model_id = f"{checkpoint.model_id}+{adapter.name}" if adapter else checkpoint.model_id
    return Computing(checkpoint, model_id, preprocessing, tower, dtype, loaded.fingerprint, attention, stager, streams)


def _card(settings: ServeSettings, computing: Computing, graphs: GraphSet, mode: str) -> ModelCard:
    """The description of a model with these graphs."""
    checkpoint, tower, attention = computing.checkpoint, computing.tower, computing.attention
    captured = {budget.tokens for budget in graphs.ladder}
    return ModelCard(
        model_id=computing.model_id,
        model_type=checkpoint.family.model_type,
        fingerprint=computing.fingerprint,
        dtype=DType.of(str(computing.dtype).removeprefix("torch.")),
        geometry=tower.geometry,
        preprocessing=computing.preprocessing,
        ladder=graphs.ladder,
        dropped={budget.tokens: reason for budget, reason in graphs.dropped.items() if budget.tokens not in captured},
        limits=_limits(settings, tower),
        graphs=mode,
        attention=attention.name if attention else DENSE,
        device=str(tower.device),
        version=release(),
        backends=backends_of(attention, graphs.ladder),
        unavailable=unavailable(tower.device, attention.unused if attention else {}, graphs=mode != "off"),
        pooling=checkpoint.pooling,
        poolings=checkpoint.poolings,
        matryoshka=checkpoint.matryoshka if checkpoint.pooling is not Pooling.NONE else None,
    )


def device_of(name: str) -> torch.device:
    """The device that a setting names. Raises UsageError if it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


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
        cached_bytes=settings.cache_bytes,
    )


def _outbox(settings: DeliverySettings, device: torch.device) -> Outbox | None:
    """Memory that rows are delivered from; None if there is nothing to deliver from there. Raises UsageError."""
    if not settings.nixl or (device.type == "cpu" and not settings.stored_bytes):
        return None
    nbytes = _PASSING_BYTES + settings.stored_bytes
    try:
        return Outbox(device, nbytes)
    except RuntimeError as error:  # of the allocators of CPU and CUDA
        text = f"{nbytes} bytes of {device} for NIXL cannot be allocated: {str(error).partition(chr(10))[0]}"
        raise UsageError(f"--store-bytes: {text}") from None


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
    )
    loaded = (checkpoint.folder, card.model_type, card.dtype.label, card.device, len(card.ladder))
    _log.info("loaded %s (%s) in %s on %s, %d graphs", *loaded)
