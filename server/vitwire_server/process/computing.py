"""How a tower's blocks are computed: their attention, their precision, fused or compiled."""

import logging
from collections.abc import Mapping

import torch

from vitwire_server.config.settings import ServeSettings, UsageError
from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.items import Modality
from vitwire_server.core.models import NotOnDevice, Place, Precision, Preparation, Preprocessing
from vitwire_server.preparing.device.checks import fault_of
from vitwire_server.preparing.rules.recipe import Recipe, recipes_of
from vitwire_server.process.precision import reduce_precision
from vitwire_server.runtime.attention.selection import Selection, select
from vitwire_server.runtime.compiler.hot_shapes import HotShapes
from vitwire_server.runtime.compiler.messages import Factory
from vitwire_server.runtime.compiler.worker import served
from vitwire_server.runtime.devices import kernel_fault
from vitwire_server.runtime.memory.streams import Streams
from vitwire_server.runtime.staging import Stager
from vitwire_server.runtime.toolchain import cxx_fault, triton_fault
from vitwire_server.towers.checkpoints.checkpoint import Checkpoint
from vitwire_server.towers.tower import Tower

_log = logging.getLogger(__name__)
DENSE = "sdpa"
"""The only backend for towers without segments."""


def chosen_attention(settings: ServeSettings, tower: Tower, *, captured: bool) -> Selection | None:
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


def fused_blocks(
    settings: ServeSettings, tower: Tower, attention: Selection | None, stager: Stager, streams: Streams
) -> Precision | None:
    """Reduce the precision if that is asked for, and fuse the blocks around their attention."""

    def finish() -> None:
        if settings.compile == "auto" and tower.device.type == "cuda":
            _fuse(tower, attention, reduced=settings.precision == "fp8")

    if settings.precision == "fp8":
        return reduce_precision(tower, stager, streams, floor=settings.precision_floor, finish=finish)
    finish()
    return None


def _fuse(tower: Tower, attention: Selection | None, *, reduced: bool) -> None:
    if fault := kernel_fault(tower.device) or triton_fault():
        _log.warning("blocks are not fused, which is slower: %s", fault)
        return
    from vitwire_server.runtime.fused.fusing import fuse_tower  # noqa: PLC0415 - triton comes with CUDA builds of torch

    fused = fuse_tower(tower, attention, reduced=reduced)
    _log.info("%d of %d blocks fused", fused, len(tower.blocks))


def preparation_of(
    settings: ServeSettings, tower: Tower, preprocessing: Mapping[Modality, Preprocessing]
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
    """Compiles frequent shapes; None if they stay eager."""
    if settings.precision == "fp8" or not _compiles(settings.compile, tower):
        return None
    arguments = {
        "model": str(checkpoint.folder.resolve()),
        "pooling": checkpoint.pooling.value,
        "dtype": str(tower.dtype).removeprefix("torch."),
        "attention": attention.name if attention else DENSE,
    }
    return HotShapes(tower, Factory(f"{served.__module__}:{served.__name__}", arguments))


def _compiles(setting: str, tower: Tower) -> bool:
    """Whether to compile frequent shapes: on CPU only, by default only for bfloat16, where it helps."""
    wanted = setting == "on" or (setting == "auto" and tower.dtype is torch.bfloat16)
    if not wanted or tower.device.type != "cpu":
        return False
    if fault := cxx_fault():
        _log.warning("frequent shapes are not compiled, which is slower: %s", fault)
    return not fault
