"""Towers of tiles that need to know an image's layout, or put an item together from rows of its tiles.

An image is computed as one or more units of tiles. What a unit's forward takes in addition to pixels, and which of
its rows an item is made of, is laid out for each batch.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.towers.layouts.tiles import TileTower
from vitwire_server.towers.metadata import Capacity
from vitwire_server.towers.tower import Metadata

_KEPT_GRIDS = 1024
"""Grids whose own metadata is kept."""


@dataclass(frozen=True, slots=True)
class UnitInput:
    """One kind of metadata: a row for each unit."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    padding: int = 0
    """Value in units without an item."""
    counts_tiles: bool = False
    """Values number the item's tiles, and count on from the items before it."""


class AssembledEncoder(TileTower):
    """From the tiles of units to rows, of which each item picks its own: an index brings them into the items' order."""

    inputs: Mapping[str, UnitInput]
    """Inputs of `encode_units` in addition to tiles, by name."""

    @cached_property
    def _laid_alone(self) -> Callable[[Grid], tuple[Mapping[str, Tensor], Tensor]]:
        return lru_cache(maxsize=_KEPT_GRIDS)(self.lay)

    @abstractmethod
    def lay(self, grid: Grid) -> tuple[Mapping[str, Tensor], Tensor]:
        """Of an item that is alone: each input, `(units, ...)`, and the numbers of the rows that it is made of."""

    @abstractmethod
    def encode_units(self, tiles: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Tiles `(tiles, C, H, W)` to rows `(units, unit.rows, width)`. Never synchronises with the host."""

    def reserve(self, capacity: Capacity) -> Metadata:
        tensors = {
            name: torch.full((capacity.segments, *each.shape), each.padding, dtype=each.dtype, device=self.device)
            for name, each in self.inputs.items()
        }
        order = torch.zeros(capacity.tokens, dtype=torch.int64, device=self.device)
        return Metadata(capacity, {**tensors, "order": order}, {})

    def prepare(self, grids: Sequence[Grid], metadata: Metadata) -> None:
        super().prepare(grids, metadata)
        paddings = {name: each.padding for name, each in self.inputs.items()}
        host = {
            name: torch.full(buffer.shape, paddings.get(name, 0), dtype=buffer.dtype, pin_memory=buffer.is_cuda)
            for name, buffer in metadata.tensors.items()
        }
        self._lay(grids, host)
        for name, buffer in metadata.tensors.items():
            buffer.copy_(host[name], non_blocking=True)

    def _lay(self, grids: Sequence[Grid], host: Mapping[str, Tensor]) -> None:
        """Write each item's metadata behind the one before."""
        unit = tile = row = 0
        for grid in grids:
            own, order = self._laid_alone(grid)
            footprint = self.footprint(grid)
            for name, each in self.inputs.items():
                values = own[name] + tile if each.counts_tiles else own[name]
                host[name][unit : unit + footprint.segments] = values
            host["order"][row : row + footprint.rows] = order + unit * self.unit.rows
            unit, tile, row = unit + footprint.segments, tile + footprint.patches, row + footprint.rows

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        rows = self.encode_units(self.tiles(pixels), metadata.tensors).flatten(0, 1)
        return rows.index_select(0, metadata.tensors["order"])
