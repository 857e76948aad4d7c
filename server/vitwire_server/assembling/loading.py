"""The last step: an engine that can encode, its planner, and the description of both."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from vitwire_server.assembling.capturing import Captured, capture
from vitwire_server.assembling.device_share import outbox_bytes
from vitwire_server.assembling.placing import Placed, place
from vitwire_server.config.service_flags import MAX_MESSAGE_BYTES
from vitwire_server.config.settings import ServeSettings, UsageError
from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.errors import EncoderError
from vitwire_server.core.items import DType, Item, Modality
from vitwire_server.core.models import Limits, ModelCard, NotOnDevice, Place, Preparation
from vitwire_server.core.plans import Fallback
from vitwire_server.core.pooling import Pooling
from vitwire_server.observe.metrics import Metrics
from vitwire_server.preparing.device.checks import fault_of
from vitwire_server.preparing.rules.recipe import Recipe, recipes_of
from vitwire_server.release import release
from vitwire_server.runtime.devices import kernel_fault, unavailable
from vitwire_server.runtime.engine import Engine
from vitwire_server.runtime.ladders.calibration import sample_items
from vitwire_server.runtime.ladders.learning import LadderLearner
from vitwire_server.runtime.memory.outbox import Outbox
from vitwire_server.runtime.staging import Stager
from vitwire_server.runtime.toolchain import triton_fault
from vitwire_server.scheduling.planner import Planner
from vitwire_server.sessions.arena import ArenaMemory
from vitwire_server.towers.files import CheckpointError
from vitwire_server.towers.tower import Tower

_log = logging.getLogger(__name__)
_MIB = 1 << 20
_FLOAT32_BYTES = 4
_WARM_UP_TOKENS = 16


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


def load_model(
    settings: ServeSettings,
    metrics: Metrics,
    on_weights_loaded: Callable[[], None] = lambda: None,
    memory: ArenaMemory | None = None,
) -> LoadedModel:
    """Load the tower, capture its graphs and time them. Raises CheckpointError or UsageError.

    `on_weights_loaded` is called before capture; `memory` is where rows go. Everything runs on the caller's thread.
    """
    return _load(capture(place(settings, on_weights_loaded, memory), metrics), metrics)


def _load(captured: Captured, metrics: Metrics) -> LoadedModel:
    """Make the engine and its planner."""
    placed, graphs = captured.placed, captured.graphs
    tower = placed.tower
    outbox = _outbox(placed.settings, tower.device)
    recipes, preparation = _preparation(placed)
    stager = Stager(tower.geometry, placed.preprocessing, tower.device)
    engine = Engine(tower, graphs, stager, placed.streams, outbox, recipes)
    canary = _warm_up(engine, tower)
    costs = captured.timed(engine)
    metrics.ladder.in_use(graphs.ladder)
    metrics.model.attends(placed.backends(graphs.ladder))
    card = _card(captured, preparation)
    _announce(placed, card, metrics)
    reason = Fallback.OVERSIZE if graphs.dropped else Fallback.GRAPHS_OFF
    dropped = Ladder(tuple(sorted(graphs.dropped)))
    planner = Planner(graphs.ladder, captured.bounds, without_graph=reason, dropped=dropped, costs=costs)
    learner = captured.learner(planner, metrics.ladder)
    return LoadedModel(engine, planner, card, tower, canary, outbox, placed.backends, learner)


def _card(captured: Captured, preparation: Preparation) -> ModelCard:
    """The description of a model with these graphs."""
    placed, graphs = captured.placed, captured.graphs
    checkpoint, tower, attention = placed.checkpoint, placed.tower, placed.attention
    sizes = {budget.tokens for budget in graphs.ladder}
    return ModelCard(
        model_id=placed.model_id,
        model_type=checkpoint.family.model_type,
        fingerprint=placed.fingerprint,
        dtype=DType.of(str(tower.dtype).removeprefix("torch.")),
        geometry=tower.geometry,
        preprocessing=placed.preprocessing,
        ladder=graphs.ladder,
        dropped={budget.tokens: reason for budget, reason in graphs.dropped.items() if budget.tokens not in sizes},
        limits=_limits(placed.settings, tower),
        graphs=placed.mode,
        attention=placed.attention_name,
        device=str(tower.device),
        device_sharing=placed.sharing,
        version=release(),
        backends=placed.backends(graphs.ladder),
        unavailable=unavailable(tower.device, attention.unused if attention else {}, graphs=placed.mode != "off"),
        preparation=preparation,
        pooling=checkpoint.pooling,
        poolings=checkpoint.poolings,
        matryoshka=checkpoint.matryoshka if checkpoint.pooling is not Pooling.NONE else None,
        clip_groups=tower.clip_groups,
    )


def _preparation(placed: Placed) -> tuple[Mapping[Modality, Recipe] | None, Preparation]:
    """The recipes by which the engine prepares pictures, None if decoders do, and why."""
    settings, tower = placed.settings, placed.tower
    if settings.prepare == "cpu":
        return None, Preparation(Place.CPU, NotOnDevice.ASKED)
    if settings.prepare == "auto" and tower.device.type == "cpu":
        return None, Preparation(Place.CPU, NotOnDevice.NO_DEVICE)
    recipes = recipes_of(placed.preprocessing, tower.geometry)
    fault = "" if tower.device.type == "cpu" else kernel_fault(tower.device) or triton_fault()
    if fault := fault or fault_of(recipes, tower.device, tower.dtype):
        _log.warning("pictures are prepared on the CPU, which is slower: %s", fault)
        return None, Preparation(Place.CPU, NotOnDevice.UNVERIFIED, fault)
    return recipes, Preparation(Place.DEVICE, None)


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


def _outbox(settings: ServeSettings, device: torch.device) -> Outbox | None:
    """Memory that rows are delivered from; None if there is nothing to deliver from there. Raises UsageError."""
    nbytes = outbox_bytes(settings, device)
    if not nbytes:
        return None
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


def _announce(placed: Placed, card: ModelCard, metrics: Metrics) -> None:
    metrics.model.loaded(
        card.fingerprint,
        model=card.model_id,
        model_type=card.model_type,
        dtype=card.dtype.label,
        device=card.device,
        graphs=card.graphs,
        attention=card.attention,
        pooling=card.pooling,
        version=card.version,
    )
    loaded = (placed.checkpoint.folder, card.model_type, card.dtype.label, card.device, len(card.ladder))
    _log.info("loaded %s (%s) in %s on %s, %d graphs", *loaded)
