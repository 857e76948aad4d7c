"""The first step: a tower on its device, with its attention and fused blocks. It has no graphs yet."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from vitwire_server.assembling.device_share import bound_device, sharing, with_room_for_graphs
from vitwire_server.config.model_flags import GraphSettings
from vitwire_server.config.settings import ServeSettings, UsageError
from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.pooling import Pooling
from vitwire_server.runtime.attention.selection import Selection, select
from vitwire_server.runtime.devices import dtype_fault, kernel_fault
from vitwire_server.runtime.memory.streams import CudaStreams, HostStreams, Streams, pin
from vitwire_server.runtime.toolchain import triton_fault
from vitwire_server.sessions.arena import ArenaMemory
from vitwire_server.towers.checkpoints.checkpoint import Checkpoint, load_tower, open_checkpoint
from vitwire_server.towers.checkpoints.lora import Adapter
from vitwire_server.towers.tower import Tower

_log = logging.getLogger(__name__)
_DENSE = "sdpa"
"""The only backend for towers without segments."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A tower on its device that computes as the settings say."""

    settings: ServeSettings
    mode: str
    """How graphs are run: cuda, simulated or off."""
    checkpoint: Checkpoint
    model_id: str
    preprocessing: Mapping[Modality, Preprocessing]
    tower: Tower
    fingerprint: str
    attention: Selection | None
    """None for tile towers, which always use SDPA."""
    streams: Streams
    sharing: str
    """How the device is shared, in a line; empty on a CPU."""

    @property
    def attention_name(self) -> str:
        """The attention backend of the longest segments."""
        return self.attention.name if self.attention else _DENSE

    def backends(self, ladder: Ladder) -> dict[Budget, str]:
        """The attention backend of each budget's longest segments."""
        attention = self.attention
        return {each: attention.at(each.max_segment_patches).name if attention else _DENSE for each in ladder}

    def completed(self, ladder: Ladder) -> Ladder:
        """The ladder with the budgets for short segments that its attention gains from."""
        return self.attention.completed(ladder, merge=self.tower.geometry.merge) if self.attention else ladder


def place(settings: ServeSettings, on_weights_loaded: Callable[[], None], memory: ArenaMemory | None) -> Placed:
    """Load the tower, and choose how it computes. Raises CheckpointError or UsageError."""
    device = device_of(settings.device)
    mode = graph_mode(settings.graphs, device)
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
    shared = sharing(device, settings.device_memory)
    if shared:
        _log.info("%s: %s", device, shared)
    nbytes = bound_device(settings, device)
    try:
        loaded = load_tower(checkpoint, dtype=dtype, device=device, adapter=adapter)
    except torch.OutOfMemoryError as error:
        raise UsageError(f"the weights do not fit on {device} ({shared}): {str(error).partition('. ')[0]}") from None
    if nbytes is not None:
        settings = with_room_for_graphs(settings, nbytes, torch.cuda.memory_allocated(device))
    on_weights_loaded()
    attention = chosen_attention(settings, loaded.tower, captured=mode == "cuda")
    fuse_blocks(loaded.tower, attention)
    model_id = f"{checkpoint.model_id}+{adapter.name}" if adapter else checkpoint.model_id
    streams = _streams(device, memory)
    return Placed(
        settings,
        mode,
        checkpoint,
        model_id,
        preprocessing,
        loaded.tower,
        loaded.fingerprint,
        attention,
        streams,
        shared,
    )


def _streams(device: torch.device, memory: ArenaMemory | None) -> Streams:
    if device.type != "cuda":
        return HostStreams(memory)
    if memory:
        memory.arena.touch(memory.kept)
        pin(memory.arena.view(0, memory.kept))
    return CudaStreams(device, memory)


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


def chosen_attention(settings: GraphSettings, tower: Tower, *, captured: bool) -> Selection | None:
    """Choose the attention backend; None for tile towers, which always use SDPA."""
    if not tower.segmented:
        if settings.attention_backend not in ("auto", _DENSE):
            raise UsageError(f"--attention-backend {settings.attention_backend}: tile towers support only {_DENSE}")
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
