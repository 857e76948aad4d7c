"""Computation of a tower's blocks: attention, fused kernels; and where pictures are prepared."""

import logging
from collections.abc import Mapping

from vitwire_server.config.model_flags import GraphSettings
from vitwire_server.config.service_flags import FileSettings
from vitwire_server.config.settings import UsageError
from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.items import Modality
from vitwire_server.core.models import NotOnDevice, Place, Preparation, Preprocessing
from vitwire_server.preparing.device.checks import fault_of
from vitwire_server.preparing.rules.recipe import Recipe, recipes_of
from vitwire_server.runtime.attention.selection import Selection, select
from vitwire_server.runtime.devices import kernel_fault
from vitwire_server.runtime.toolchain import triton_fault
from vitwire_server.towers.tower import Tower

_log = logging.getLogger(__name__)
DENSE = "sdpa"
"""The only backend for towers without segments."""


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


def fuse_blocks(tower: Tower, attention: Selection | None) -> None:
    """Fuse the blocks of a tower on CUDA around their attention, if Triton runs there."""
    if tower.device.type != "cuda":
        return
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
