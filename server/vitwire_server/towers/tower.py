"""What the engine needs to know of a tower, for every layout of pixels."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitwire_server.core.budgets import Budget, default_tokens
from vitwire_server.core.capacities import Capacities, PackedCapacities
from vitwire_server.core.footprints import Footprints
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.models import Geometry
from vitwire_server.towers.metadata import Capacity


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


class Tower(ABC):
    """One vision encoder: what an item costs on it, and its forward at a capacity.

    `prepare` lays the metadata of a batch into buffers, `forward` never looks at the host. Pixels come as
    rows, of patches or of whole tiles; those of the items lie one after the other, padding behind them.
    """

    geometry: Geometry
    model: Any
    """The module whose parameters and configuration are the tower's."""
    segmented: ClassVar[bool] = True
    """Attends within packed segments, through one of the registered backends."""

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """All modules whose tensors a forward reads, by name."""
        return {"model": self.model}

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

    def to(self, device: torch.device | str) -> None:
        """Move everything that a forward reads."""
        for module in self.modules.values():
            module.to(device)

    def rewrite(self) -> None:  # noqa: B027 - optional
        """Exchange modules for ones that compute the same faster: once, after the weights were loaded."""

    def use_attention(self, implementation: str) -> None:
        """Attend through the function registered with transformers under this name."""
        # transformers' documented switch
        self.model.config._attn_implementation = implementation  # noqa: SLF001

    @property
    @abstractmethod
    def attention_heads(self) -> tuple[int, int]:
        """Their number, and the size of one."""

    @property
    def resampler_heads(self) -> tuple[int, int] | None:
        """Those of a resampler that attends through the same backend; None without one."""
        return None

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The layers, which are compiled one by one."""
        return list(self.model.blocks)

    @property
    @abstractmethod
    def footprints(self) -> Footprints:
        """What items cost, by their grid."""

    def footprint(self, grid: Grid) -> Footprint:
        """What an item of this grid costs. The grid must be one that the geometry finds nothing wrong about."""
        return self.footprints(grid)

    def sizes(self, most: int) -> list[int]:
        """Tokens of the budgets to capture if none are configured, up to `most`."""
        return default_tokens(most) if most else []

    @property
    def capacities(self) -> Capacities:
        """The budgets that the tower can have."""
        return PackedCapacities(self.geometry.merge)

    def budget(self, tokens: int, *, max_items: int, max_frames: int) -> Budget:
        """A budget of `tokens`, or of a little less where tokens come in tiles."""
        return self.capacities.budget(tokens, max_items=max_items, max_frames=max_frames)

    def samples(self, tokens: int, items: int) -> list[Grid]:
        """At most `items` images that together have `tokens` tokens: squares of 256, and a strip."""
        merge = self.geometry.merge
        squares = min(tokens // 256, items - 1)
        grids = [Grid(1, 16 * merge, 16 * merge)] * squares
        if rest := tokens - 256 * squares:
            grids.append(Grid(1, merge, merge * rest))
        return grids

    def samples_for(self, budget: Budget) -> list[Grid]:
        """Images that about fill a budget and that it holds."""
        return self.samples(budget.tokens, budget.max_items)

    @abstractmethod
    def capacity(self, budget: Budget) -> Capacity:
        """Sizes for a graph of `budget`, with slots for its padding."""

    @abstractmethod
    def exact(self, grids: Sequence[Grid]) -> Capacity:
        """Sizes that fit a batch without padding."""

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
