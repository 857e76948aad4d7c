"""The packed `grid_thw` family: patches of all items in one sequence, attention per frame."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import vision_utils

from vitwire_server.core.budgets import Budget
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import Modality, total
from vitwire_server.core.models import Geometry, Preprocessing, Resizing
from vitwire_server.towers.family import Family, at
from vitwire_server.towers.metadata import Boundaries, Capacity, Grids, Order, Part, Rows
from vitwire_server.towers.preprocessing import Rule, read_preprocessing
from vitwire_server.towers.rewrites import aligned_mlps, linear_patches
from vitwire_server.towers.tower import Metadata, Tower

_KEPT_PATCHES = 1 << 20
"""Patches whose metadata is kept per grid: about 64 bytes each on the device."""
_TAPS = {"bilinear": 4, "bicubic": 16}
"""Neighbours that a resampled position is made of."""


@dataclass(frozen=True, kw_only=True)
class PackedFamily(Family):
    """What differs between the packed `grid_thw` towers; the rest is in `PackedTower`."""

    width: str
    """Path of the field that holds the columns of an embedding's main part, in the whole configuration."""
    adapter: "type[PackedTower] | None" = None
    """`PackedTower`, or one of its kind for towers that need more than keyword arguments."""
    positions: str | None = None
    """Path of the tower's module whose learned positions are resampled to each grid; empty for the tower itself."""
    layers: str = "blocks"
    """Path of the tower's layers."""
    windows: bool = False
    """Most layers attend within windows."""
    deepstack: bool = False
    """Features of inner layers are appended to each row."""
    whole_clips: bool = False
    """Attention spans all frames of a clip."""
    counts_frames: bool = False
    """Position ids are `(frame, row, column)`."""
    raster: bool = False
    """Patches of a frame lie line by line, not token by token."""
    reads_grids: bool = False
    """The forward reads a row of `grid_thw` for each frame."""
    image_pixels: tuple[int, int] | None = None
    """Area bounds of images where the checkpoint's processor has none of the usual form."""
    images_span_frames: bool = False
    """The area bounds of images count the repeated frames."""
    video_pixels: tuple[int, int] = (128 * 28 * 28, 768 * 28 * 28)
    """Area bounds of videos where the checkpoint has no video preprocessor."""
    videos_span_frames: bool = False
    """The area bounds of videos count all frames of a clip together."""
    layout = "packed patches"

    def build(self, parts: Mapping[str, nn.Module], config: Any) -> "PackedTower":  # noqa: ANN401
        """See Family."""
        return (self.adapter or PackedTower)(self, parts, config)

    def preprocessing(self, folder: Path, config: Any) -> dict[Modality, Preprocessing]:  # noqa: ANN401
        """See Family."""
        ways = [Resizing.AREA if can else Resizing.OTHER for can in (self.prepared, self.prepared_videos)]
        rules = {Modality.IMAGE: Rule(self.images_span_frames, self.image_pixels, ways[0])}
        if self.videos:
            rules[Modality.VIDEO] = Rule(self.videos_span_frames, self.video_pixels, ways[1])
        return read_preprocessing(folder, rules, channels=sizes(self.tower.configuration(config))["channels"])


def sizes(config: Any) -> dict[str, int]:  # noqa: ANN401 - configurations are of many classes
    """Patch, merge, temporal size and channels of a tower's configuration. Raises AttributeError."""
    merge = config.merge_kernel_size[0] if hasattr(config, "merge_kernel_size") else config.spatial_merge_size
    channels = next((getattr(config, key) for key in ("in_channels", "num_channels") if hasattr(config, key)), 3)
    temporal = getattr(config, "temporal_patch_size", 1)
    return {"patch": config.patch_size, "merge": merge, "temporal": temporal, "channels": channels}


class PackedTower(Tower):
    """A stock transformers tower, called with its data-dependent part computed ahead.

    `prepare` lays the metadata of a batch into buffers, `forward` never looks at the host.
    """

    after: ClassVar[frozenset[str]] = frozenset()
    """Metadata that the rows need after the tower's own forward."""

    def __init__(self, family: PackedFamily, parts: Mapping[str, nn.Module], config: Any) -> None:  # noqa: ANN401
        """`parts` are the modules of `family`, loaded; they stay where they are. `config` is the whole one."""
        self.family = family
        self.model: Any = parts["tower"]
        own: Any = self.model.config
        levels = len(own.deepstack_visual_indexes) if family.deepstack else 0
        width = at(config, family.width)
        self.geometry = self._geometry(**sizes(own), width=width * (1 + levels), levels=levels, raster=family.raster)
        self._positions: Any = None if family.positions is None else self.model.get_submodule(family.positions)
        self._window_side = own.window_size // own.patch_size if family.windows else 0
        self._parts = self._kinds()
        self._measured: OrderedDict[Grid, dict[str, Tensor]] = OrderedDict()
        self._kept = 0

    @property
    def heads(self) -> tuple[int, int]:
        """Attention heads and the size of one."""
        config: Any = self.model.config
        hidden = getattr(config, "embed_dim", None) or config.hidden_size
        return config.num_attention_heads, hidden // config.num_attention_heads

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """See Tower."""
        return list(self.model.get_submodule(self.family.layers))

    def rewrite(self) -> None:
        linear_patches(self.model)
        if self.device.type == "cuda":
            aligned_mlps(self.model)

    def footprint(self, grid: Grid) -> Footprint:
        """See Tower."""
        whole = self.family.whole_clips
        return Footprint(
            patches=grid.patches,
            tokens=grid.patches // self.geometry.merge**2,
            segments=1 if whole else grid.t,
            longest=grid.patches if whole else grid.frame_patches,
        )

    def capacity(self, budget: Budget) -> Capacity:
        """Sizes for a graph of `budget`, with slots for its padding."""
        patches = budget.tokens * self.geometry.merge**2
        return Capacity(
            patches=patches,
            tokens=budget.tokens,
            segments=budget.max_segments + ceil(patches / budget.max_segment_patches),
            longest=budget.max_segment_patches,
            windows=self._most_windows(budget.tokens, budget.max_segments),
        )

    def exact(self, grids: Sequence[Grid]) -> Capacity:
        """Sizes that fit a batch without padding."""
        load = total([self.footprint(grid) for grid in grids])
        windows = sum(len(self._measure(grid)["cu_window_seqlens"]) for grid in grids) if self._window_side else 0
        return Capacity(load.patches, load.tokens, load.segments, load.longest, windows)

    def reserve(self, capacity: Capacity) -> Metadata:
        """Buffers for metadata of `capacity`, on the tower's device."""
        tensors = {key: part.allocate(capacity, self.device) for key, part in self._parts.items()}
        bounds = {"max_seqlen": capacity.longest}
        if self._window_side:
            bounds["max_window_seqlen"] = self._window_side**2
        return Metadata(capacity, tensors, bounds)

    def prepare(self, grids: Sequence[Grid], metadata: Metadata) -> None:
        """Lay out the metadata of a batch; what `capacity` has beyond it becomes padding.

        Raises ValueError if the batch has more segments than the capacity has slots.
        """
        measured = [self._measure(grid) for grid in grids]
        patches = [grid.patches for grid in grids]
        for key, part in self._parts.items():
            part.lay(metadata.tensors[key], [own[key] for own in measured], patches, metadata.capacity)

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        """`pixels (patches, C*T*p*p)` to rows `(tokens, width)`: `[main | deepstack 0 | ...]`."""
        tensors = metadata.tensors
        grids = tensors["grid_thw"] if self.family.reads_grids else pixels.new_empty((0, 3), dtype=torch.int64)
        output = self.model(self._shaped(pixels), grid_thw=grids, **self._given(tensors), **metadata.bounds)
        return self._finish(output, tensors)

    def _geometry(self, **fields: Any) -> Geometry:  # noqa: ANN401 - those of Geometry
        return Geometry(**fields)

    def _given(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Keyword arguments of the tower."""
        return {key: tensor for key, tensor in tensors.items() if key not in {*self.after, "grid_thw"}}

    def _shaped(self, pixels: Tensor) -> Tensor:
        """Rows of pixels in the shape that the tower takes."""
        return pixels

    def _finish(self, output: Any, tensors: Mapping[str, Tensor]) -> Tensor:  # noqa: ANN401 - of many classes
        """From the tower's output to rows `(tokens, width)`."""
        del tensors
        rows: Tensor = output.pooler_output
        return torch.cat([rows, *output.deepstack_features], dim=-1) if self.family.deepstack else rows

    def _kinds(self) -> dict[str, Part]:
        """The metadata that the family's forward takes, by keyword."""
        parts: dict[str, Part] = {
            "cu_seqlens": Boundaries(slots=lambda c: c.segments, longest=lambda c: c.longest),
            "position_ids": Rows((3 if self.family.counts_frames else 2,), torch.int64),
        }
        if self._positions is not None:
            taps = _TAPS[self._positions.interpolation_mode]
            parts["interp_indices"] = Rows((taps,), torch.int64)
            parts["interp_weights"] = Rows((taps,), torch.float32)
        if self.family.windows:
            window = self._window_side**2
            parts["window_index"] = Order()
            parts["cu_window_seqlens"] = Boundaries(slots=lambda c: c.windows, longest=lambda _: window)
        if self.family.reads_grids:
            parts["grid_thw"] = Grids()
        return parts

    def _measure(self, grid: Grid) -> dict[str, Tensor]:
        """The metadata of an item that is alone, kept per grid (least recently used leave)."""
        if grid in self._measured:
            self._measured.move_to_end(grid)
            return self._measured[grid]
        computed = self._compute(grid)
        measured = {
            key: computed[key] if part.on_host else _to_device(computed[key], self.device)
            for key, part in self._parts.items()
        }
        self._measured[grid] = measured
        self._kept += grid.patches
        while self._kept > _KEPT_PATCHES and len(self._measured) > 1:
            self._kept -= prod(self._measured.popitem(last=False)[0])
        return measured

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        """transformers' own functions, on the host; rows of a frame are computed once for all frames."""
        family = self.family
        block = 1 if family.raster else self.geometry.merge
        whole, frame = torch.tensor([grid]), torch.tensor([(1, grid.h, grid.w)])
        places = vision_utils.get_vision_position_ids(frame, block).repeat(grid.t, 1)
        parts = {"cu_seqlens": torch.arange(1, grid.t + 1, dtype=torch.int32) * grid.frame_patches}
        parts["position_ids"] = places
        if family.whole_clips:
            parts["cu_seqlens"] = parts["cu_seqlens"][-1:]
        if family.counts_frames:
            parts["position_ids"] = torch.cat([frame_of(grid)[:, None], places], dim=-1)
        if self._positions is not None:
            taps = vision_utils.get_vision_interpolation_indices_and_weights(
                frame,
                num_grid_per_side=self._positions.num_grid_per_side,
                mode=self._positions.interpolation_mode,
                align_corners=self._positions.interpolation_align_corners,
                spatial_merge_size=block,
            )
            parts["interp_indices"], parts["interp_weights"] = (rows.repeat(grid.t, 1) for rows in taps)
        if family.windows:
            order, ends = vision_utils.get_vision_window_index(
                whole, self.geometry.merge, self.model.window_size, self.model.patch_size
            )
            parts["window_index"], parts["cu_window_seqlens"] = order, ends[1:]
        if family.reads_grids:
            parts["grid_thw"] = frame.repeat(grid.t, 1)
        return parts

    def _most_windows(self, tokens: int, segments: int) -> int:
        """Bound of the windows that any items of so many tokens and frames need, padding included.

        A frame of h x w tokens has ceil(h/s)*ceil(w/s) <= h*w/s + (s-1)/s windows of side s.
        """
        if not self._window_side:
            return 0
        side = self._window_side // self.geometry.merge
        return ceil(tokens / side + segments * (side - 1) / side) + 1


def frame_of(grid: Grid) -> Tensor:
    """The frame of each patch, `(patches,)`."""
    return torch.arange(grid.t).repeat_interleave(grid.frame_patches)


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, made without waiting for it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
