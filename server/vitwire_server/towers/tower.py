"""A tower as the engine knows it, for every layout of pixels."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitwire_server.core.budgets import Budget, default_tokens
from vitwire_server.core.capacities import Capacities, PackedCapacities
from vitwire_server.core.footprints import Footprints, PatchFootprints
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import total
from vitwire_server.core.models import Geometry
from vitwire_server.towers.metadata import Capacity

_SQUARE = 16
"""Tokens a side of the images that budgets are sampled with."""


@dataclass(slots=True)
class Metadata:
    """Keyword arguments of one forward, in buffers that can be laid out again and again."""

    capacity: Capacity
    tensors: dict[str, Tensor]
    bounds: dict[str, int]
    crops: Tensor | None = None
    """Crops `(crops, C*H*W)`, in towers that take them; set by the caller of `forward`."""
    laid: tuple[Grid, ...] = ()
    """The items that a graph laid it out for: for the same ones, nothing needs to be written."""


class Budgeted:
    """The costs of items on a tower, and the budgets that hold them."""

    @cached_property
    def geometry(self) -> Geometry:
        """Sizes that clients and codec need to know."""
        raise NotImplementedError

    @cached_property
    def footprint(self) -> Footprints:
        """The cost of an item, by its grid: one that the geometry finds nothing wrong about."""
        return PatchFootprints(self.geometry.merge)

    @cached_property
    def capacities(self) -> Capacities:
        """The budgets that the tower can have."""
        return PackedCapacities(self.geometry.merge)

    def sizes(self, most: int) -> list[int]:
        """Tokens of the budgets to capture if none are configured, up to `most`."""
        return default_tokens(most) if most else []

    def budget(self, tokens: int, *, max_items: int, max_frames: int) -> Budget:
        """A budget of `tokens`, or of a little less if tokens come in tiles."""
        return self.capacities.budget(tokens, max_items=max_items, max_frames=max_frames)

    def samples(self, tokens: int, items: int) -> list[Grid]:
        """At most `items` images of `tokens` together, or of a few less: squares of 256, and a nearly square rest."""
        merge, longest = self.geometry.merge, self.geometry.longest_side
        if self.geometry.line_ends:  # of squares one more token in 16, and of a rest as many as it has lines
            tokens = max(1, 16 * tokens // 17 - isqrt(tokens))
        squares = min(tokens // _SQUARE**2, items - 1)
        rest = tokens - squares * _SQUARE**2
        rows = next((n for n in range(isqrt(rest), 0, -1) if rest % n == 0), 0)
        columns = rest // rows if rows else 0
        if longest is not None and columns * merge > longest:
            rows = columns = isqrt(rest)
        shapes = [(_SQUARE, _SQUARE)] * squares + [(rows, columns)] * bool(rest)
        return [Grid(1, height * merge, width * merge) for height, width in shapes]

    def samples_for(self, budget: Budget) -> list[Grid]:
        """Images that about fill a budget and that it holds: for short segments, squares of about their length."""
        merge, grids = self.geometry.merge, self.samples(budget.tokens, budget.max_items)
        if max(self.footprint(grid).longest for grid in grids) <= budget.max_segment_patches:
            return grids
        side = isqrt(budget.max_segment_patches // merge**2)
        square = Grid(1, side * merge, side * merge)
        count = min(budget.tokens // self.footprint(square).tokens, budget.max_items, budget.max_segments)
        return [square] * max(1, count)


class Tower(Budgeted, ABC):
    """One vision encoder: what an item costs on it, and its forward at a capacity.

    `prepare` lays the metadata of a batch into buffers, `forward` never looks at the host. Pixels come as
    rows, of patches or of whole tiles; the items' lie one after the other, padding behind them.
    """

    model: Any
    """The module whose parameters and configuration are the tower's."""
    modules: Mapping[str, nn.Module]
    """All modules whose tensors a forward reads, by name."""
    blocks: Sequence[nn.Module]
    """The layers, which are compiled one by one."""
    attention_heads: tuple[int, int]
    """The number of heads, and the size of one."""
    resampler_heads: tuple[int, int] | None = None
    """Heads of a resampler that attends through the same backend; None without one."""
    segmented: ClassVar[bool] = True
    """Attends within packed segments, through one of the registered backends."""
    clip_groups = False  # see ModelCard

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = next(self.model.parameters()).device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The type that the tower computes in."""
        dtype: torch.dtype = next(self.model.parameters()).dtype
        return dtype

    def rewrite(self) -> None:
        """Exchange modules for ones that compute the same faster: once, after the weights were loaded."""

    def use_attention(self, implementation: str) -> None:
        """Attend through the function registered with transformers under this name, if attention is segmented."""
        if self.segmented:
            self.model.config._attn_implementation = implementation  # noqa: SLF001 - transformers' documented switch

    @abstractmethod
    def capacity(self, budget: Budget) -> Capacity:
        """Sizes for a graph of `budget`, with slots for its padding."""

    def exact(self, grids: Sequence[Grid]) -> Capacity:
        """Sizes that fit a batch without padding."""
        load = total([self.footprint(grid) for grid in grids])
        return Capacity(load.patches, load.tokens, load.segments, load.longest, crops=load.crops)

    def rows(self, capacity: Capacity) -> int:
        """Rows that a forward of this capacity returns, those of padding included."""
        return capacity.tokens

    @abstractmethod
    def reserve(self, capacity: Capacity) -> Metadata:
        """Buffers for metadata of `capacity`, on the tower's device."""

    @abstractmethod
    def prepare(self, grids: Sequence[Grid], metadata: Metadata) -> None:
        """Lay out the metadata of a batch; what `capacity` has beyond it becomes padding.

        Raises ValueError if the batch does not fit.
        """

    @abstractmethod
    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        """Rows of pixels `(capacity.patches, geometry.row)` to rows `(self.rows(capacity), width)`."""

    def split(self, rows: Tensor, footprints: Sequence[Footprint]) -> list[Tensor]:
        """The rows of each item, as views; rows of padding are left out."""
        counts = [footprint.rows for footprint in footprints]
        return list(torch.split(rows[: sum(counts)], counts))
