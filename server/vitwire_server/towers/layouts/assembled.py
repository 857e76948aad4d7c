"""Towers of tiles that put an item together from rows of its tiles or crops: an index, laid out for each batch."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import MappingProxyType

import torch
from torch import Tensor

from vitwire_server.core.budgets import Budget
from vitwire_server.core.capacities import CropCapacities
from vitwire_server.core.footprints import CropFootprints
from vitwire_server.core.grids import Grid
from vitwire_server.core.models import TileGeometry
from vitwire_server.towers.layouts.tiles import TileShape, TileTower
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


class OrderedTower(TileTower):
    """Rows are brought into the items' order by an index, which is laid out for each batch with other inputs."""

    inputs: Mapping[str, UnitInput] = MappingProxyType({})
    """Inputs of units in addition to tiles, by name."""

    @abstractmethod
    def _lay(self, grids: Sequence[Grid], host: Mapping[str, Tensor], capacity: Capacity) -> None:
        """Write each item's metadata behind the one before."""

    @abstractmethod
    def _unordered(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        """All rows `(rows, width)`."""

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
        self._lay(grids, host, metadata.capacity)
        for name, buffer in metadata.tensors.items():
            buffer.copy_(host[name], non_blocking=True)

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        return self._unordered(pixels, metadata).index_select(0, metadata.tensors["order"])


class AssembledEncoder(OrderedTower):
    """An image is one or more units of tiles, from whose rows it picks its own."""

    @cached_property
    def _laid_alone(self) -> Callable[[Grid], tuple[Mapping[str, Tensor], Tensor]]:
        return lru_cache(maxsize=_KEPT_GRIDS)(self.lay)

    @abstractmethod
    def lay(self, grid: Grid) -> tuple[Mapping[str, Tensor], Tensor]:
        """For an item that is alone, each input, `(units, ...)`, and the numbers of the rows that it is made of."""

    @abstractmethod
    def encode_units(self, tiles: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Tiles `(tiles, C, H, W)` to rows `(units, unit.rows, width)`. Never synchronises with the host."""

    def _lay(self, grids: Sequence[Grid], host: Mapping[str, Tensor], capacity: Capacity) -> None:
        del capacity
        unit = tile = row = 0
        for grid in grids:
            own, order = self._laid_alone(grid)
            footprint = self.footprint(grid)
            for name, each in self.inputs.items():
                values = own[name] + tile if each.counts_tiles else own[name]
                host[name][unit : unit + footprint.segments] = values
            host["order"][row : row + footprint.rows] = order + unit * self.unit.rows
            unit, tile, row = unit + footprint.segments, tile + footprint.patches, row + footprint.rows

    def _unordered(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        return self.encode_units(self.tiles(pixels), metadata.tensors).flatten(0, 1)


class CropEncoder(OrderedTower):
    """An overview of each image, and crops of some of them; rows of an item are its crops', then its overview's.

    A budget holds a number of overviews and a number of crops of another size, which are in one graph.
    """

    crop: TileShape

    @abstractmethod
    def encode_crops(self, crops: Tensor) -> Tensor:
        """`(crops, C, h, w)` to `(crops, tokens, width)`."""

    @cached_property
    def geometry(self) -> TileGeometry:
        return replace(super().geometry, crop=(self.crop.height, self.crop.width), crops_replace=True)

    @cached_property
    def footprint(self) -> CropFootprints:
        return CropFootprints(self.tile.tokens, self.crop.tokens, self.unit.longest)

    @cached_property
    def capacities(self) -> CropCapacities:
        return CropCapacities(self.tile.tokens, self.crop.tokens, self.unit.longest)

    def sizes(self, most: int) -> list[int]:
        return [tokens for tokens in self.capacities.shares if tokens <= most]

    def samples(self, tokens: int, items: int) -> list[Grid]:
        overviews, crops = self.capacities.share(tokens)
        return [Grid(1 + crops, 1, max(1, crops)), *[Grid(1, 1, 1)] * (min(overviews, items) - 1)]

    def capacity(self, budget: Budget) -> Capacity:
        overviews = budget.max_segments - budget.max_crops
        return Capacity(
            overviews, budget.tokens, budget.max_segments, budget.max_segment_patches, crops=budget.max_crops
        )

    def _lay(self, grids: Sequence[Grid], host: Mapping[str, Tensor], capacity: Capacity) -> None:
        overview, crop, at = self.tile.tokens, self.crop.tokens, 0
        overviews, crops = 0, capacity.patches * overview
        for grid in grids:
            own = (grid.t - 1) * crop
            torch.arange(crops, crops + own, out=host["order"][at : at + own])
            torch.arange(overviews, overviews + overview, out=host["order"][at + own : at + own + overview])
            crops, overviews, at = crops + own, overviews + overview, at + own + overview

    def _unordered(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        assert metadata.crops is not None, "this tower is run with crops"
        rows = self.encode(self.tiles(pixels)).flatten(0, 1)
        if not metadata.capacity.crops:
            return rows
        crops = metadata.crops.view(-1, self.channels, self.crop.height, self.crop.width)
        return torch.cat([rows, self.encode_crops(crops).flatten(0, 1)])
