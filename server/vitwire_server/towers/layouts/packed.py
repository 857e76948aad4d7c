"""The packed `grid_thw` family: stock towers of transformers, called with their data-dependent part computed ahead."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers import vision_utils

from vitwire_server.core.budgets import Budget
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Geometry, Preprocessing, Resizing
from vitwire_server.towers.family import Parts, at
from vitwire_server.towers.layouts.patches import PatchFamily, PatchTower
from vitwire_server.towers.metadata import Boundaries, Capacity, Grids, Kind, Order, Rows
from vitwire_server.towers.processors.areas import Rule, read_preprocessing
from vitwire_server.towers.tower import Metadata

_TAPS = {"bilinear": 4, "bicubic": 16}
"""Neighbours that a resampled position is made of."""


@dataclass(frozen=True, kw_only=True)
class PackedFamily(PatchFamily):
    """What differs between the packed `grid_thw` towers; the rest is in `PackedTower`."""

    adapter: "type[PackedTower] | None" = None
    """`PackedTower`, or one of its kind for towers that need more than keyword arguments."""
    positions: str | None = None
    """Path of the tower's module whose learned positions are resampled to each grid; empty for the tower itself."""
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
    resizing: Resizing = Resizing.AREA
    """How images are resized that clients can prepare."""
    image_pixels: tuple[int, int] | None = None
    """Area bounds of images where the checkpoint's processor has none of the usual form."""
    images_span_frames: bool = False
    """The area bounds of images count the repeated frames."""
    video_pixels: tuple[int, int] = (128 * 28 * 28, 768 * 28 * 28)
    """Area bounds of videos where the checkpoint has no video preprocessor."""
    videos_span_frames: bool = False
    """The area bounds of videos count all frames of a clip together."""
    layout = "packed patches"

    def build(self, parts: Parts, config: Any) -> "PackedTower":  # noqa: ANN401
        """See Family."""
        return (self.adapter or PackedTower)(self, parts, config)

    def preprocessing(self, folder: Path, config: Any) -> dict[Modality, Preprocessing]:  # noqa: ANN401
        """See Family."""
        images = self.resizing if self.prepared else Resizing.OTHER
        videos = Resizing.AREA if self.prepared_videos else Resizing.OTHER
        rules = {Modality.IMAGE: Rule(self.images_span_frames, self.image_pixels, images)}
        if self.videos:
            rules[Modality.VIDEO] = Rule(self.videos_span_frames, self.video_pixels, videos)
        channels = sizes(self.tower.configuration(config)).channels
        return read_preprocessing(folder, rules, channels=channels, converts=self.converts)


class Sizes(NamedTuple):
    """What a tower's configuration says of a patch."""

    patch: int
    merge: int
    temporal: int
    channels: int


def sizes(config: Any) -> Sizes:  # noqa: ANN401 - configurations are of many classes
    """Those of a tower's configuration. Raises AttributeError."""
    merge = config.merge_kernel_size[0] if hasattr(config, "merge_kernel_size") else config.spatial_merge_size
    channels = next((getattr(config, key) for key in ("in_channels", "num_channels") if hasattr(config, key)), 3)
    return Sizes(config.patch_size, merge, getattr(config, "temporal_patch_size", 1), channels)


class PackedTower(PatchTower):
    """A stock tower that takes `grid_thw`, and keyword arguments in place of what it would compute of it."""

    family: PackedFamily
    after: ClassVar[frozenset[str]] = frozenset()
    """Metadata that the rows need after the tower's own forward."""

    def __init__(self, family: PackedFamily, parts: Parts, config: Any) -> None:  # noqa: ANN401
        """`config` is the whole checkpoint's."""
        super().__init__(family, parts)
        own: Any = self.model.config
        levels = len(own.deepstack_visual_indexes) if family.deepstack else 0
        width = at(config, family.width) * (1 + levels)
        self.geometry = Geometry(**sizes(own)._asdict(), width=width, levels=levels, raster=family.raster)
        self._positions: Any = None if family.positions is None else self.model.get_submodule(family.positions)
        self._window_side = own.window_size // own.patch_size if family.windows else 0
        self._kinds |= self._keywords()

    @property
    def heads(self) -> tuple[int, int]:
        """See Tower."""
        config: Any = self.model.config
        hidden = getattr(config, "embed_dim", None) or config.hidden_size
        return config.num_attention_heads, hidden // config.num_attention_heads

    def footprint(self, grid: Grid) -> Footprint:
        """See Tower."""
        own = super().footprint(grid)
        return own._replace(segments=1, longest=grid.patches) if self.family.whole_clips else own

    def capacity(self, budget: Budget) -> Capacity:
        """See Tower."""
        return replace(super().capacity(budget), windows=self._most_windows(budget.tokens, budget.max_segments))

    def exact(self, grids: Sequence[Grid]) -> Capacity:
        """See Tower."""
        windows = sum(len(self._measure(grid)["cu_window_seqlens"]) for grid in grids) if self._window_side else 0
        return replace(super().exact(grids), windows=windows)

    def reserve(self, capacity: Capacity) -> Metadata:
        """See Tower."""
        metadata = super().reserve(capacity)
        if self._window_side:
            metadata.bounds["max_window_seqlen"] = self._window_side**2
        return metadata

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        """`pixels (patches, C*T*p*p)` to rows `(tokens, width)`: `[main | deepstack 0 | ...]`."""
        tensors = metadata.tensors
        grids = tensors["grid_thw"] if self.family.reads_grids else pixels.new_empty((0, 3), dtype=torch.int64)
        output = self.model(self._shaped(pixels), grid_thw=grids, **self._given(tensors), **metadata.bounds)
        return self._finish(output, tensors)

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

    def _keywords(self) -> dict[str, Kind]:
        """The metadata that the family's forward takes besides its segments."""
        kinds: dict[str, Kind] = {"position_ids": Rows((3 if self.family.counts_frames else 2,), torch.int64)}
        if self._positions is not None:
            taps = _TAPS[self._positions.interpolation_mode]
            kinds["interp_indices"] = Rows((taps,), torch.int64)
            kinds["interp_weights"] = Rows((taps,), torch.float32)
        if self.family.windows:
            window = self._window_side**2
            kinds["window_index"] = Order()
            kinds["cu_window_seqlens"] = Boundaries(slots=lambda c: c.windows, longest=lambda _: window)
        if self.family.reads_grids:
            kinds["grid_thw"] = Grids()
        return kinds

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        """transformers' own functions, on the host; rows of a frame are computed once for all frames."""
        family, computed = self.family, super()._compute(grid)
        frame = torch.tensor([(1, grid.h, grid.w)])
        places = vision_utils.get_vision_position_ids(frame, self._block).repeat(grid.t, 1)
        computed["position_ids"] = places
        if family.whole_clips:
            computed["cu_seqlens"] = computed["cu_seqlens"][-1:]
        if family.counts_frames:
            computed["position_ids"] = torch.cat([frame_of(grid)[:, None], places], dim=-1)
        if self._positions is not None:
            taps = self._taps(frame)
            computed["interp_indices"], computed["interp_weights"] = (rows.repeat(grid.t, 1) for rows in taps)
        if family.windows:
            order, ends = vision_utils.get_vision_window_index(
                torch.tensor([grid]), self.geometry.merge, self.model.window_size, self.model.patch_size
            )
            computed["window_index"], computed["cu_window_seqlens"] = order, ends[1:]
        if family.reads_grids:
            computed["grid_thw"] = frame.repeat(grid.t, 1)
        return computed

    @property
    def _block(self) -> int:
        """Patches a side that lie one after the other: those of a token, unless the order is a raster's."""
        return 1 if self.family.raster else self.geometry.merge

    def _taps(self, frame: Tensor) -> tuple[Tensor, Tensor]:
        """Of each patch of a frame, the learned positions that its own is resampled from, and their weights."""
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            frame,
            num_grid_per_side=self._positions.num_grid_per_side,
            mode=self._positions.interpolation_mode,
            align_corners=self._positions.interpolation_align_corners,
            spatial_merge_size=self._block,
        )
        return indices, weights

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
