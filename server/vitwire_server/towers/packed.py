"""The packed `grid_thw` family: patches of all items in one sequence, attention per frame."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor, nn
from transformers import vision_utils

from vitwire_server.core.budgets import Budget
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import total
from vitwire_server.core.models import Geometry
from vitwire_server.towers.families import Family
from vitwire_server.towers.metadata import Boundaries, Capacity, Order, Part, Rows

_KEPT_PATCHES = 1 << 20
"""Patches whose metadata is kept per grid: about 64 bytes each on the device."""


@dataclass(slots=True)
class Metadata:
    """Keyword arguments of one forward, in buffers that can be laid out again and again."""

    capacity: Capacity
    tensors: dict[str, Tensor]
    bounds: dict[str, int]


class PackedTower:
    """A stock transformers tower, called with its data-dependent part computed ahead.

    `prepare` lays the metadata of a batch into buffers, `forward` never looks at the host.
    """

    def __init__(self, family: Family, model: nn.Module) -> None:
        """`model` is the tower of `family`, loaded; it stays where it is."""
        config: Any = model.config
        levels = len(config.deepstack_visual_indexes) if family.deepstack else 0
        self.family = family
        self.model = model
        self.geometry = Geometry(
            patch=config.patch_size,
            merge=config.spatial_merge_size,
            temporal=config.temporal_patch_size,
            channels=config.in_channels,
            width=getattr(config, family.width) * (1 + levels),
            levels=levels,
        )
        self._window = config.window_size if family.windows else 0
        self._parts = _parts(family, model, self.geometry.merge)
        self._measured: OrderedDict[Grid, dict[str, Tensor]] = OrderedDict()
        self._kept = 0

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """What the tower computes in."""
        return next(self.model.parameters()).dtype

    def use_attention(self, implementation: str) -> None:
        """Attend through the function registered with transformers under this name."""
        config: Any = self.model.config
        config._attn_implementation = implementation  # noqa: SLF001 - the name is transformers' documented switch

    def footprint(self, grid: Grid) -> Footprint:
        """What an item of this grid costs. Rows and columns must be multiples of the merge size."""
        return Footprint(
            patches=grid.patches,
            tokens=grid.patches // self.geometry.merge**2,
            segments=grid.t,
            longest=grid.frame_patches,
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
        windows = sum(len(self._measure(grid)["cu_window_seqlens"]) for grid in grids) if self._window else 0
        return Capacity(load.patches, load.tokens, load.segments, load.longest, windows)

    def reserve(self, capacity: Capacity) -> Metadata:
        """Buffers for metadata of `capacity`, on the tower's device."""
        tensors = {key: part.allocate(capacity, self.device) for key, part in self._parts.items()}
        bounds = {"max_seqlen": capacity.longest}
        if self._window:
            bounds["max_window_seqlen"] = self._window_patches
        return Metadata(capacity, tensors, bounds)

    def prepare(self, grids: Sequence[Grid], metadata: Metadata) -> None:
        """Lay out the metadata of a batch; what `capacity` has beyond it becomes padding.

        Raises ValueError if the batch has more segments than the capacity has slots.
        """
        measured = [self._measure(grid) for grid in grids]
        for key, part in self._parts.items():
            part.lay(metadata.tensors[key], [parts[key] for parts in measured], grids, metadata.capacity)

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        """`pixels (patches, C*T*p*p)` to rows `(tokens, width)`: `[main | deepstack 0 | ...]`."""
        output = self.model(
            pixels,
            grid_thw=pixels.new_empty((0, 3), dtype=torch.int64),
            **metadata.tensors,
            **metadata.bounds,
        )
        rows: Tensor = output.pooler_output
        if self.family.deepstack:
            rows = torch.cat([rows, *output.deepstack_features], dim=-1)
        return rows

    def split(self, rows: Tensor, footprints: Sequence[Footprint]) -> list[Tensor]:
        """The rows of each item, as views; rows of padding are left out."""
        tokens = [footprint.tokens for footprint in footprints]
        return list(torch.split(rows[: sum(tokens)], tokens))

    @property
    def _window_patches(self) -> int:
        return (self._window // self.geometry.patch) ** 2

    def _most_windows(self, tokens: int, segments: int) -> int:
        """Bound of the windows that any items of so many tokens and frames need, padding included.

        A frame of h x w tokens has ceil(h/s)*ceil(w/s) <= h*w/s + (s-1)/s windows of side s.
        """
        if not self._window:
            return 0
        side = self._window // self.geometry.patch // self.geometry.merge
        return ceil(tokens / side + segments * (side - 1) / side) + 1

    def _measure(self, grid: Grid) -> dict[str, Tensor]:
        """The metadata of one grid, from the cache if it is there (least recently used leave)."""
        if grid in self._measured:
            self._measured.move_to_end(grid)
            return self._measured[grid]
        measured = {key: part.measure(grid, self.device) for key, part in self._parts.items()}
        self._measured[grid] = measured
        self._kept += grid.patches
        while self._kept > _KEPT_PATCHES and len(self._measured) > 1:
            self._kept -= prod(self._measured.popitem(last=False)[0])
        return measured


def _parts(family: Family, model: Any, merge: int) -> dict[str, Part]:  # noqa: ANN401 - stock towers have no common type
    """The metadata that a family's forward takes, by keyword."""

    def positions(grid: Tensor) -> Tensor:
        return vision_utils.get_vision_position_ids(grid, merge)

    def interpolation(grid: Tensor) -> tuple[Tensor, Tensor]:
        return vision_utils.get_vision_interpolation_indices_and_weights(
            grid,
            num_grid_per_side=model.num_grid_per_side,
            mode=model.interpolation_mode,
            align_corners=model.interpolation_align_corners,
            spatial_merge_size=merge,
        )

    def windows(grid: Tensor) -> tuple[Tensor, Tensor]:
        return vision_utils.get_vision_window_index(
            grid, spatial_merge_size=merge, window_size=model.window_size, patch_size=model.patch_size
        )

    parts: dict[str, Part] = {
        "cu_seqlens": Boundaries(
            vision_utils.get_vision_cu_seqlens, slots=lambda c: c.segments, longest=lambda c: c.longest
        ),
        "position_ids": Rows(positions),
    }
    if family.interpolates:
        parts["interp_indices"] = Rows(lambda grid: interpolation(grid)[0])
        parts["interp_weights"] = Rows(lambda grid: interpolation(grid)[1])
    if family.windows:
        window = (model.window_size // model.patch_size) ** 2
        parts["window_index"] = Order(lambda grid: windows(grid)[0])
        parts["cu_window_seqlens"] = Boundaries(
            lambda grid: windows(grid)[1], slots=lambda c: c.windows, longest=lambda _: window
        )
    return parts
