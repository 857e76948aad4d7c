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
_TAPS = 4
"""Neighbours that a bilinearly resampled position is made of."""


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
        self.model: Any = model
        self.geometry = Geometry(
            patch=config.patch_size,
            merge=config.spatial_merge_size,
            temporal=config.temporal_patch_size,
            channels=config.in_channels,
            width=getattr(config, family.width) * (1 + levels),
            levels=levels,
        )
        self._window_side = config.window_size // config.patch_size if family.windows else 0
        self._parts = self._kinds()
        self._measured: OrderedDict[Grid, dict[str, Tensor]] = OrderedDict()
        self._kept = 0

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """What the tower computes in."""
        dtype: torch.dtype = next(self.model.parameters()).dtype
        return dtype

    def use_attention(self, implementation: str) -> None:
        """Attend through the function registered with transformers under this name."""
        # transformers' documented switch
        self.model.config._attn_implementation = implementation  # noqa: SLF001

    @property
    def heads(self) -> tuple[int, int]:
        """Attention heads and the size of one."""
        config: Any = self.model.config
        hidden = getattr(config, "embed_dim", None) or config.hidden_size
        return config.num_heads, hidden // config.num_heads

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

    def _kinds(self) -> dict[str, Part]:
        """The metadata that the family's forward takes, by keyword."""
        parts: dict[str, Part] = {
            "cu_seqlens": Boundaries(slots=lambda c: c.segments, longest=lambda c: c.longest),
            "position_ids": Rows(2, torch.int64),
        }
        if self.family.interpolates:
            parts["interp_indices"] = Rows(_TAPS, torch.int64)
            parts["interp_weights"] = Rows(_TAPS, torch.float32)
        if self.family.windows:
            window = self._window_side**2
            parts["window_index"] = Order()
            parts["cu_window_seqlens"] = Boundaries(slots=lambda c: c.windows, longest=lambda _: window)
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
        merge = self.geometry.merge
        whole, frame = torch.tensor([grid]), torch.tensor([(1, grid.h, grid.w)])
        parts = {
            "cu_seqlens": vision_utils.get_vision_cu_seqlens(whole)[1:],
            "position_ids": vision_utils.get_vision_position_ids(frame, merge).repeat(grid.t, 1),
        }
        if self.family.interpolates:
            taps = vision_utils.get_vision_interpolation_indices_and_weights(
                frame,
                num_grid_per_side=self.model.num_grid_per_side,
                mode=self.model.interpolation_mode,
                align_corners=self.model.interpolation_align_corners,
                spatial_merge_size=merge,
            )
            parts["interp_indices"], parts["interp_weights"] = (rows.repeat(grid.t, 1) for rows in taps)
        if self.family.windows:
            order, ends = vision_utils.get_vision_window_index(
                whole, merge, self.model.window_size, self.model.patch_size
            )
            parts["window_index"], parts["cu_window_seqlens"] = order, ends[1:]
        return parts

    def _most_windows(self, tokens: int, segments: int) -> int:
        """Bound of the windows that any items of so many tokens and frames need, padding included.

        A frame of h x w tokens has ceil(h/s)*ceil(w/s) <= h*w/s + (s-1)/s windows of side s.
        """
        if not self._window_side:
            return 0
        side = self._window_side // self.geometry.merge
        return ceil(tokens / side + segments * (side - 1) / side) + 1


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, made without waiting for it."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
