"""Computation of a tower's blocks: attention, precision, fused kernels, compiled shapes."""

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from vitwire_server.config.model_flags import DeviceSettings, GraphSettings
from vitwire_server.config.service_flags import FileSettings
from vitwire_server.config.settings import ServeSettings, UsageError
from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.errors import EncoderError
from vitwire_server.core.items import Modality
from vitwire_server.core.models import NotOnDevice, Place, Precision, Preparation, Preprocessing
from vitwire_server.preparing.device.checks import fault_of
from vitwire_server.preparing.rules.recipe import Recipe, recipes_of
from vitwire_server.runtime.attention.selection import Selection, select
from vitwire_server.runtime.compiler.hot_shapes import HotShapes
from vitwire_server.runtime.compiler.messages import Factory
from vitwire_server.runtime.compiler.worker import served
from vitwire_server.runtime.devices import kernel_fault
from vitwire_server.runtime.engine import Engine
from vitwire_server.runtime.graphs import GraphSet, SimulatedRecorder
from vitwire_server.runtime.kernels.operands import FLOAT8
from vitwire_server.runtime.memory.streams import Streams
from vitwire_server.runtime.precision.choosing import Half, Reducible, largest_set, named
from vitwire_server.runtime.precision.float8 import device_fault
from vitwire_server.runtime.precision.similarity import Comparison
from vitwire_server.runtime.staging import Stager
from vitwire_server.runtime.toolchain import cxx_fault, triton_fault
from vitwire_server.towers.checkpoints.checkpoint import Checkpoint
from vitwire_server.towers.files import CheckpointError
from vitwire_server.towers.tower import Tower

_log = logging.getLogger(__name__)
DENSE = "sdpa"
"""The only backend for towers without segments."""
_TYPE = str(FLOAT8).removeprefix("torch.")
_MARGIN = 0.2
"""Share of the accepted loss that blocks are chosen without: fused, they round in other places."""
_LEAST_SHARE = 0.25
"""Of the weights that can be reduced; less in float8 saves too little time to be worth the second precision."""


class BelowFloor(UsageError):
    """Float8 loses more than `--precision-floor` allows."""


def compute_dtype(settings: DeviceSettings, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The tower's dtype for a checkpoint of `stored`. Raises UsageError if the device has no float8."""
    if settings.precision == "fp8":
        if fault := device_fault(device) or (triton_fault() if device.type == "cuda" else ""):
            raise UsageError(f"--precision fp8: {fault}; serve without it")
        return torch.bfloat16
    chosen: torch.dtype = stored if settings.dtype == "auto" else getattr(torch, settings.dtype)
    return chosen


def chosen_attention(settings: GraphSettings, tower: Tower, *, captured: bool) -> Selection | None:
    """Choose the attention backend; None for tile towers, which always use SDPA."""
    if not tower.segmented:
        if settings.attention_backend not in ("auto", DENSE):
            raise UsageError(f"--attention-backend {settings.attention_backend}: tile towers support only {DENSE}")
        return None
    try:
        selection = select(
            settings.attention_backend,
            tower.device,
            tower.dtype,
            *tower.attention_heads,
            captured=captured,
            resampler=tower.resampler_heads,
        )
    except ValueError as error:
        raise UsageError(f"--attention-backend: {error}") from error
    tower.use_attention(selection.implementation)
    return selection


def backends_of(attention: Selection | None, ladder: Ladder) -> dict[Budget, str]:
    """The attention backend of each budget's longest segments."""
    return {each: attention.at(each.max_segment_patches).name if attention else DENSE for each in ladder}


def reduce_precision(
    tower: Tower, stager: Stager, streams: Streams, settings: DeviceSettings, finish: Callable[[], None]
) -> Precision:
    """Reduce blocks of the tower to float8, then call `finish`, which fuses them, and compare rows with those before.

    Raises BelowFloor if a row is less similar than the floor, and UsageError if no layer can be reduced.
    """
    engine = Engine(tower, GraphSet(tower, Ladder(), SimulatedRecorder()), stager, streams)
    try:
        comparison = Comparison(tower, engine)
    except EncoderError as error:
        raise CheckpointError(f"the forward of a test picture failed: {error}") from error
    reducible = Reducible(tower.blocks)
    if not reducible.sizes:
        raise UsageError("--precision fp8: no linear layer of this tower can be computed in float8; serve without it")
    halves = _reduced_halves(settings, reducible, comparison)
    layers, share, blocks = reducible.reduce(halves), reducible.share(halves), ""
    if len(halves) < len(reducible.sizes):
        blocks = named(halves)
        _log.info("%.0f %% of the blocks' weights in %s: --precision-blocks %s", 100 * share, _TYPE, blocks)
    if stored := reducible.stored(halves):
        _log.info("%d linear layers have the float8 values and scales that the checkpoint stores", stored)
    del reducible  # the layers in the other precision
    if tower.device.type == "cuda":
        torch.cuda.empty_cache()
    finish()
    similarities = comparison.similarities()
    least, median = float(similarities.min()), float(similarities.median())
    rows = f"{len(similarities)} rows of test pictures, cosine to bfloat16: least {least:.5f}, median {median:.5f}"
    _log.info("%d linear layers in %s; %s", layers, _TYPE, rows)
    floor = settings.precision_floor
    if not least >= floor:  # also for NaN
        raise BelowFloor(_below(floor, least, median))
    return Precision(_TYPE, layers, least, median, blocks)


def _reduced_halves(settings: DeviceSettings, reducible: Reducible, comparison: Comparison) -> list[Half]:
    """The halves of blocks to reduce, sorted. Raises UsageError; BelowFloor if too few reach the floor."""
    possible, floor = reducible.sizes, settings.precision_floor
    if settings.precision_blocks == "all":
        return sorted(possible)
    if settings.precision_parts is not None:
        return _pinned(settings.precision_blocks, settings.precision_parts, possible)
    measured: list[Tensor] = []

    def lowest(halves: Collection[Half]) -> float:
        reducible.reduce(halves)
        measured.append(comparison.similarities())
        return float(measured[-1].min())

    halves = largest_set(possible, lowest, floor + _MARGIN * (1 - floor))
    if (share := reducible.share(halves)) < _LEAST_SHARE:
        of_all = measured[0]
        enough = (
            f"{share:.0%} of the blocks' weights in float8 reach the floor, less than the {_LEAST_SHARE:.0%} that pay"
        )
        raise BelowFloor(_below(floor, float(of_all.min()), float(of_all.median()), f"; {enough}"))
    return halves


def _pinned(flag: str, parts: Collection[tuple[int, str]], possible: Collection[Half]) -> list[Half]:
    """The halves that a flag names. Raises UsageError over one that cannot be reduced."""
    found = set()
    for number, name in parts:
        own = {half for half in possible if half.block == number and name in ("", half.name)}
        if not own:
            what = f"{name}:{number}" if name else f"block {number}"
            raise UsageError(f"--precision-blocks {flag}: {what} cannot be reduced; the tower has {named(possible)}")
        found |= own
    return sorted(found)


def _below(floor: float, least: float, median: float, more: str = "") -> str:
    return (
        f"--precision-floor {floor}: with --precision fp8, the lowest cosine similarity to bfloat16 is "
        f"{least:.5f} (median {median:.5f}){more}; serve without --precision fp8, or lower the floor if this is enough"
    )


def fingerprint(weights: str, precision: Precision | None) -> str:
    """The fingerprint of embeddings in clients and caches, which keeps precisions and sets of blocks apart."""
    if precision is None:
        return weights
    blocks = f" blocks {precision.blocks}" if precision.blocks else ""
    return hashlib.sha256(f"{weights} {precision.type}{blocks}".encode()).hexdigest()


def fused_blocks(
    settings: ServeSettings, tower: Tower, attention: Selection | None, stager: Stager, streams: Streams
) -> Precision | None:
    """Reduce the precision if that is asked for, and fuse the blocks around their attention."""

    def finish() -> None:
        if settings.compile == "auto" and tower.device.type == "cuda":
            _fuse(tower, attention)

    if settings.precision == "fp8":
        return reduce_precision(tower, stager, streams, settings, finish)
    finish()
    return None


def _fuse(tower: Tower, attention: Selection | None) -> None:
    if fault := kernel_fault(tower.device) or triton_fault():
        _log.warning("blocks are not fused, which is slower: %s", fault)
        return
    from vitwire_server.runtime.fused.fusing import fuse_tower  # noqa: PLC0415 - triton comes with CUDA builds of torch

    fused = fuse_tower(tower, attention)
    _log.info("%d of %d blocks fused", fused, len(tower.blocks))


def preparation_of(
    settings: FileSettings, tower: Tower, preprocessing: Mapping[Modality, Preprocessing]
) -> tuple[Mapping[Modality, Recipe] | None, Preparation]:
    """The recipes by which the engine prepares pictures, None if decoders do, and why."""
    if settings.prepare == "cpu":
        return None, Preparation(Place.CPU, NotOnDevice.ASKED)
    if settings.prepare == "auto" and tower.device.type == "cpu":
        return None, Preparation(Place.CPU, NotOnDevice.NO_DEVICE)
    recipes = recipes_of(preprocessing, tower.geometry)
    fault = "" if tower.device.type == "cpu" else kernel_fault(tower.device) or triton_fault()
    if fault := fault or fault_of(recipes, tower.device, tower.dtype):
        _log.warning("pictures are prepared on the CPU, which is slower: %s", fault)
        return None, Preparation(Place.CPU, NotOnDevice.UNVERIFIED, fault)
    return recipes, Preparation(Place.DEVICE, None)


def hot_shapes(
    settings: ServeSettings, checkpoint: Checkpoint, tower: Tower, attention: Selection | None
) -> HotShapes | None:
    """Compiles frequent shapes; None if they stay eager: on CPU only, by default only for bfloat16, where it helps."""
    wanted = settings.compile == "on" or (settings.compile == "auto" and tower.dtype is torch.bfloat16)
    if settings.precision == "fp8" or not wanted or tower.device.type != "cpu":
        return None
    if fault := cxx_fault():
        _log.warning("frequent shapes are not compiled, which is slower: %s", fault)
        return None
    arguments = {
        "model": str(checkpoint.folder.resolve()),
        "pooling": checkpoint.pooling.value,
        "dtype": str(tower.dtype).removeprefix("torch."),
        "attention": attention.name if attention else DENSE,
    }
    return HotShapes(tower, Factory(f"{served.__module__}:{served.__name__}", arguments))
