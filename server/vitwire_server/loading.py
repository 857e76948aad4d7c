"""From settings to a tower with its graphs, ready to run."""

import logging
import time
from dataclasses import dataclass
from importlib.metadata import version

import torch

from vitwire_server.core.budgets import Ladder, budget, default_tokens
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import DType
from vitwire_server.core.models import Limits, ModelCard
from vitwire_server.core.plans import Fallback
from vitwire_server.observe.metrics import Metrics
from vitwire_server.observe.progress import progress
from vitwire_server.runtime.attention import Backend, choose
from vitwire_server.runtime.engine import Engine
from vitwire_server.runtime.graphs import GraphSet
from vitwire_server.runtime.staging import Stager
from vitwire_server.scheduling.planner import Limits as BatchLimits
from vitwire_server.scheduling.planner import Planner
from vitwire_server.settings import ServeSettings, UsageError
from vitwire_server.towers.checkpoint import Checkpoint, load_tower, open_checkpoint
from vitwire_server.towers.packed import PackedTower
from vitwire_server.towers.preprocessing import read_preprocessing

_log = logging.getLogger(__name__)
_MIB = 1 << 20
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Assembly:
    """A model that can encode: the engine, how to pack for it, and what to tell of it."""

    engine: Engine
    planner: Planner
    card: ModelCard
    tower: PackedTower


def assemble(settings: ServeSettings, metrics: Metrics) -> Assembly:
    """Load the tower and capture its graphs. Raises CheckpointError or UsageError."""
    device = _device(settings.device)
    checkpoint = open_checkpoint(settings.model)
    preprocessing = read_preprocessing(checkpoint.folder, checkpoint.family)
    dtype = checkpoint.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
    backend = _attention(settings.attention_backend, device)
    _log.info("loading %s", checkpoint.folder)
    loaded = load_tower(checkpoint, dtype=dtype, device=device, track=progress)
    tower = loaded.tower
    tower.use_attention(backend.implementation)
    ladder = _ladder(settings, tower)
    graphs = _capture(tower, ladder, metrics)
    card = ModelCard(
        model_id=checkpoint.model_id,
        model_type=checkpoint.family.model_type,
        fingerprint=loaded.fingerprint,
        dtype=DType.of(str(dtype).removeprefix("torch.")),
        geometry=tower.geometry,
        preprocessing=preprocessing,
        ladder=ladder,
        limits=_limits(settings, tower),
        graphs="simulated" if len(ladder) else "off",
        attention=backend.name,
        device=str(device),
        version=version("vitwire"),
    )
    _announce(checkpoint, card, metrics)
    engine = Engine(tower, graphs, Stager(tower.geometry, preprocessing, device))
    batch = BatchLimits(settings.max_budget_tokens, settings.max_items_per_batch, settings.max_frames_per_batch)
    planner = Planner(ladder, batch, without_graph=Fallback.GRAPHS_OFF)
    _warm_up(tower)
    return Assembly(engine, planner, card, tower)


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def _attention(name: str, device: torch.device) -> Backend:
    try:
        return choose(name, device)
    except ValueError as error:
        raise UsageError(f"--attention-backend: {error}") from error


def _ladder(settings: ServeSettings, tower: PackedTower) -> Ladder:
    if settings.graphs != "simulated":
        return Ladder()
    sizes = settings.budget_sizes or default_tokens(settings.max_budget_tokens)
    bounds = {"max_items": settings.max_items_per_batch, "max_frames": settings.max_frames_per_batch}
    return Ladder(tuple(budget(size, merge=tower.geometry.merge, **bounds) for size in sizes))


def _capture(tower: PackedTower, ladder: Ladder, metrics: Metrics) -> GraphSet:
    start = time.perf_counter()
    if len(ladder):
        _log.info("capturing %d budgets", len(ladder))
    graphs = GraphSet(tower, ladder, lambda budgets: progress(budgets, "capturing", len(ladder)))
    metrics.graphs_captured(ladder, time.perf_counter() - start, graphs.nbytes)
    return graphs


def _limits(settings: ServeSettings, tower: PackedTower) -> Limits:
    """The largest message is, unless set, the largest item there may be, in float32."""
    columns = tower.geometry.columns(frames=tower.geometry.temporal)
    largest = settings.max_patches_per_item * columns * _FLOAT32_BYTES + _MIB
    return Limits(
        request_bytes=settings.max_request_bytes or largest,
        items_per_request=settings.max_items_per_request,
        patches_per_item=settings.max_patches_per_item,
        queued_items=settings.max_queued_items,
        queued_bytes=settings.max_queued_bytes,
    )


@torch.inference_mode()
def _warm_up(tower: PackedTower) -> None:
    """One eager forward, so that the first request does not pay for lazy set-up; and a check.

    Raises UsageError if the tower's embedding is not what its configuration promises.
    """
    merge = tower.geometry.merge
    grids = [Grid(1, 4 * merge, 4 * merge)]
    metadata = tower.reserve(tower.exact(grids))
    tower.prepare(grids, metadata)
    columns = tower.geometry.columns(frames=tower.geometry.temporal)
    pixels = torch.zeros(metadata.capacity.patches, columns, dtype=tower.dtype, device=tower.device)
    rows = tower.forward(pixels, metadata)
    expected = (metadata.capacity.tokens, tower.geometry.width)
    if tuple(rows.shape) != expected or not bool(rows.isfinite().all()):
        raise UsageError(f"the warm-up forward gave {tuple(rows.shape)} rows, expected {expected}, all finite")


def _announce(checkpoint: Checkpoint, card: ModelCard, metrics: Metrics) -> None:
    metrics.model_loaded(
        model=card.model_id,
        model_type=card.model_type,
        dtype=card.dtype.label,
        device=card.device,
        graphs=card.graphs,
        attention=card.attention,
    )
    _log.info(
        "loaded %s (%s) in %s on %s, %d graphs",
        checkpoint.folder,
        card.model_type,
        card.dtype.label,
        card.device,
        len(card.ladder),
    )
