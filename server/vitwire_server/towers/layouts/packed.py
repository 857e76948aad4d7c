"""The packed `grid_thw` family: stock towers of transformers, called with their data-dependent part computed ahead."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers import vision_utils

from vitwire_server.core.budgets import Budget
from vitwire_server.core.footprints import PatchFootprints
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality
from vitwire_server.core.models import ClipGeometry, Geometry, Preprocessing, Resizing
from vitwire_server.towers.configs import Config, at
from vitwire_server.towers.family import Accepts, Parts
from vitwire_server.towers.layouts.heads import Deepstack, Head
from vitwire_server.towers.layouts.patches import TAPS, PatchFamily, PatchTower, most_windows, taps
from vitwire_server.towers.metadata import Boundaries, Capacity, Kind, Order, Rows
from vitwire_server.towers.processors.settings import AreaRule, read_areas
from vitwire_server.towers.tower import Metadata

_IMAGE_AREAS, _VIDEO_AREAS = AreaRule(), AreaRule(pixels=(128 * 28 * 28, 768 * 28 * 28))
"""Bounds of areas in most families."""


class AttentionSpan(Enum):
    """The patches that a patch attends to in most layers."""

    FRAME = auto()
    CLIP = auto()
    """All frames of a clip."""
    WINDOWS = auto()
    """A window of a frame; in some layers, the frame."""


class ListedGrids:
    """An empty `grid_thw` for a forward that lists it on the host; computing with it raises RuntimeError."""

    def tolist(self) -> list[list[int]]:
        """No grids."""
        return []

    def __getitem__(self, index: object) -> NoReturn:
        raise RuntimeError(f"the forward reads grid_thw[{index}], which is not given")

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(f"the forward reads grid_thw.{name}, which is not given")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Inputs of a tower's forward in addition to the ends of its segments, and their form."""

    learned_positions: str | None = None
    """Path of the tower's module whose positions are resampled to each grid; empty for the tower itself."""
    frame_positions: bool = False
    """Position ids are `(frame, row, column)`, rather than `(row, column)`."""
    grids: bool = False
    """The forward reads a row of `grid_thw` for each frame."""
    listed_grids: bool = False
    """The forward lists `grid_thw` on the host; the list is empty."""
    raster: bool = False
    """Patches of a frame lie line by line, rather than token by token."""
    shape: Callable[[Tensor, int], Tensor] | None = None
    """From rows of pixels and the side of a patch to the tower's pixels, if these are not `(patches, C*T*p*p)`."""


@dataclass(frozen=True, kw_only=True)
class PackedFamily(PatchFamily):
    """The differences between the packed `grid_thw` towers; the rest is in `PackedTower`."""

    head: type[Head] = Head
    """The part that follows the tower."""
    span: AttentionSpan = AttentionSpan.FRAME
    inputs: Inputs = Inputs()
    forward: "type[PackedTower] | None" = None
    """The tower's class, if it is not `PackedTower`."""
    image_areas: AreaRule = _IMAGE_AREAS
    """Bounds of the areas of images."""
    video_areas: AreaRule = _VIDEO_AREAS
    """Bounds of the areas of clips."""
    layout = "packed patches"

    @property
    def prunes(self) -> bool:
        return not (self.head.pools_frames or self.head.pools_clips)

    def build(self, parts: Parts, config: Config) -> "PackedTower":
        return (self.forward or PackedTower)(self, parts, config)

    def preprocessing(self, folder: Path, config: Config) -> dict[Modality, Preprocessing]:
        areas = {Modality.IMAGE: (self.images, self.image_areas), Modality.VIDEO: (self.videos, self.video_areas)}
        rules = {
            modality: rule if accepts is Accepts.PICTURES else replace(rule, resizing=Resizing.OTHER)
            for modality, (accepts, rule) in areas.items()
            if accepts is not Accepts.NOTHING
        }
        channels = sizes(self.tower.configuration(config)).channels
        return read_areas(folder, rules, channels=channels, converts=self.converts)


class Sizes(NamedTuple):
    """Sizes of a patch, by a tower's configuration."""

    patch: int
    merge: int
    temporal: int
    channels: int


def sizes(config: Config) -> Sizes:
    """Sizes by a tower's configuration. Raises AttributeError."""
    merge = getattr(config, "spatial_merge_size", 1)
    if hasattr(config, "merge_kernel_size"):
        merge = config.merge_kernel_size[0]
    channels = next((getattr(config, key) for key in ("in_channels", "num_channels") if hasattr(config, key)), 3)
    return Sizes(config.patch_size, merge, getattr(config, "temporal_patch_size", 1), channels)


class PackedTower(PatchTower):
    """A stock tower that takes `grid_thw`, and keyword arguments in place of what it would compute of it."""

    family: PackedFamily

    def __init__(self, family: PackedFamily, parts: Parts, config: Config) -> None:
        """`config` is the whole checkpoint's."""
        super().__init__(family, parts)
        own: Config = self.model.config
        width, hidden = at(config, family.width), getattr(own, "embed_dim", None) or own.hidden_size
        heads = own.num_attention_heads
        self.attention_heads = heads, getattr(own, "head_dim", None) or hidden // heads
        self.head = family.head(
            parts, Geometry(**sizes(own)._asdict(), width=width, levels=0, raster=family.inputs.raster)
        )
        self.geometry = self.head.geometry
        self._no_keywords = {*self.head.inputs(), "grid_thw"}
        """Metadata that the tower does not take under its own name."""
        learned = family.inputs.learned_positions
        self._learned: Any = None if learned is None else self.model.get_submodule(learned)
        self._window_side = own.window_size // own.patch_size if family.span is AttentionSpan.WINDOWS else 0
        stock = family.head in (Head, Deepstack) and not (family.forward or family.pooler)
        self.clip_groups = stock and family.span is not AttentionSpan.CLIP and family.videos is not Accepts.NOTHING

    @cached_property
    def footprint(self) -> PatchFootprints:
        geometry = self.geometry
        pooled = geometry.pooled * geometry.clip_merge**2 if isinstance(geometry, ClipGeometry) else 1
        return PatchFootprints(geometry.merge, self.family.span is AttentionSpan.CLIP, pooled)

    def capacity(self, budget: Budget) -> Capacity:
        side = self._window_side // self.geometry.merge
        windows = most_windows(budget.tokens, budget.max_segments, side) if side else 0
        return replace(super().capacity(budget), windows=windows)

    def exact(self, grids: Sequence[Grid]) -> Capacity:
        windows = sum(len(self._measure(grid)["cu_window_seqlens"]) for grid in grids) if self._window_side else 0
        return replace(super().exact(grids), windows=windows)

    def reserve(self, capacity: Capacity) -> Metadata:
        metadata = super().reserve(capacity)
        if self._window_side:
            metadata.bounds["max_window_seqlen"] = self._window_side**2
        return metadata

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        """`pixels (patches, C*T*p*p)` to rows `(tokens, width)`: `[main | deepstack 0 | ...]`."""
        tensors, inputs = metadata.tensors, self.family.inputs
        grids: Tensor | ListedGrids = ListedGrids()
        if not inputs.listed_grids:
            grids = tensors["grid_thw"] if inputs.grids else pixels.new_empty((0, 3), dtype=torch.int64)
        given = {key: tensor for key, tensor in tensors.items() if key not in self._no_keywords}
        output = self.model(
            inputs.shape(pixels, self.geometry.patch) if inputs.shape else pixels,
            grid_thw=grids,
            **given,
            **self.head.keywords(tensors),
            **metadata.bounds,
        )
        return self.head.rows(output, tensors)

    def _inputs(self) -> dict[str, Kind]:
        inputs = self.family.inputs
        kinds: dict[str, Kind] = {"position_ids": Rows((3 if inputs.frame_positions else 2,), torch.int64)}
        if self._learned is not None:
            shape = (TAPS[self._learned.interpolation_mode],)
            kinds |= {"interp_indices": Rows(shape, torch.int64), "interp_weights": Rows(shape, torch.float32)}
        if self._window_side:
            window = self._window_side**2
            kinds["window_index"] = Order()
            kinds["cu_window_seqlens"] = Boundaries(slots=lambda c: c.windows, longest=lambda _: window)
        if inputs.grids:
            kinds["grid_thw"] = Rows((3,), torch.int64, per="segments", initial=1)
        return kinds | self.head.inputs()

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        """transformers' own functions, on the host; rows of a frame are computed once for all frames."""
        inputs, computed = self.family.inputs, super()._compute(grid)
        frame, block = torch.tensor([(1, grid.h, grid.w)]), self._block(grid)
        places = vision_utils.get_vision_position_ids(frame, block).repeat(grid.t, 1)
        computed["position_ids"] = places
        if self.family.span is AttentionSpan.CLIP:
            computed["cu_seqlens"] = computed["cu_seqlens"][-1:]
        if inputs.frame_positions:
            computed["position_ids"] = torch.cat([frame_of(grid)[:, None], places], dim=-1)
        if (table := self._learned) is not None:
            mode, aligned = table.interpolation_mode, table.interpolation_align_corners
            found = taps(grid.h, grid.w, table.num_grid_per_side, mode=mode, align_corners=aligned, block=block)
            computed["interp_indices"], computed["interp_weights"] = (rows.repeat(grid.t, 1) for rows in found)
        if self._window_side:
            order, ends = vision_utils.get_vision_window_index(
                torch.tensor([grid]), self.geometry.merge, self.model.window_size, self.model.patch_size
            )
            computed["window_index"], computed["cu_window_seqlens"] = order, ends[1:]
        if inputs.grids:
            computed["grid_thw"] = frame.repeat(grid.t, 1)
        return computed | self.head.compute(grid)

    def _block(self, grid: Grid) -> int:
        """Patches a side that lie one after the other: a token's, unless the order is a raster's."""
        own = self.geometry
        merge = own.merge * own.clip_merge if isinstance(own, ClipGeometry) and grid.t > 1 else own.merge
        return 1 if self.family.inputs.raster else merge


def frame_of(grid: Grid) -> Tensor:
    """The frame of each patch, `(patches,)`."""
    return torch.arange(grid.t).repeat_interleave(grid.frame_patches)
