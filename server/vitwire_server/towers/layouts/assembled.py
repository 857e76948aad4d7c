"""Towers of tiles that need to know an image's layout, or whose rows are put together from those of its tiles.

An image is computed as one or more units of so many tiles. What a unit's forward takes beside pixels, and which of
its rows an item is made of, is laid out for each batch.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from vitwire_server.core.budgets import Budget
from vitwire_server.core.capacities import TileCapacities
from vitwire_server.core.footprints import Footprints
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import total
from vitwire_server.towers.family import Parts
from vitwire_server.towers.layouts.tiles import Encoder, TileTower, tile_steps
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
    """Values are numbers of the item's tiles; those of the items before it are added."""


class Unit(NamedTuple):
    """Sizes of a unit."""

    tiles: int
    """Tiles at most."""
    tokens: int
    """Of a budget."""
    rows: int
    """That its forward gives, before those of items are picked."""
    longest: int
    """Patches that attend to each other."""


class AssembledEncoder(Encoder):
    """From the tiles of units to rows, of which each item picks its own."""

    unit: Unit
    inputs: Mapping[str, UnitInput]
    """What `encode_units` takes beside tiles, by name."""
    footprints: Footprints
    fewest: int = 1
    """Units of the smallest item."""

    def tower(self, parts: Parts) -> TileTower:
        return AssembledTower(self, parts)

    @abstractmethod
    def lay(self, grid: Grid) -> tuple[Mapping[str, Tensor], Tensor]:
        """Of an item that is alone: each input, `(units, ...)`, and the numbers of the rows that it is made of."""

    @abstractmethod
    def encode_units(self, tiles: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Tiles `(tiles, C, H, W)` to rows `(units, unit.rows, width)`. Never synchronises with the host."""

    @abstractmethod
    def sample(self, units: int) -> Grid:
        """An image of so many units, or of as many as an image can have."""

    def encode(self, tiles: Tensor) -> Tensor:
        raise TypeError(f"{len(tiles)} tiles need the grids of their images")


class AssembledTower(TileTower):
    """A budget is a number of units, whose rows are brought into the items' order by an index."""

    encoder: AssembledEncoder

    def __init__(self, encoder: AssembledEncoder, parts: Parts) -> None:
        super().__init__(encoder, parts)
        self.footprints = encoder.footprints
        self._laid_alone = lru_cache(maxsize=_KEPT_GRIDS)(encoder.lay)

    @property
    def capacities(self) -> TileCapacities:
        unit = self.encoder.unit
        return TileCapacities(unit.tokens, unit.longest, fewest=self.encoder.fewest)

    def sizes(self, most: int) -> list[int]:
        unit = self.encoder.unit
        return [units * unit.tokens for units in tile_steps(most // unit.tokens) if units >= self.encoder.fewest]

    def samples(self, tokens: int, items: int) -> list[Grid]:
        """At most `items` images that together have as many units as go into `tokens`."""
        fewest = self.encoder.fewest
        units = max(fewest, tokens // self.encoder.unit.tokens)
        alone = min(units // fewest, items) - 1
        return [self.encoder.sample(fewest)] * alone + [self.encoder.sample(units - alone * fewest)]

    def capacity(self, budget: Budget) -> Capacity:
        units = budget.tokens // self.encoder.unit.tokens
        return Capacity(units * self.encoder.unit.tiles, budget.tokens, units, budget.max_segment_patches)

    def reserve(self, capacity: Capacity) -> Metadata:
        tensors = {
            name: torch.full((capacity.segments, *each.shape), each.padding, dtype=each.dtype, device=self.device)
            for name, each in self.encoder.inputs.items()
        }
        order = torch.zeros(capacity.tokens, dtype=torch.int64, device=self.device)
        return Metadata(capacity, {**tensors, "order": order}, {})

    def prepare(self, grids: Sequence[Grid], metadata: Metadata) -> None:
        super().prepare(grids, metadata)
        units = total([self.footprint(grid) for grid in grids]).segments
        if units > metadata.capacity.segments:
            raise ValueError(f"{units} units of tiles do not fit {metadata.capacity}")
        paddings = {name: each.padding for name, each in self.encoder.inputs.items()}
        host = {
            name: torch.full(buffer.shape, paddings.get(name, 0), dtype=buffer.dtype, pin_memory=buffer.is_cuda)
            for name, buffer in metadata.tensors.items()
        }
        self._lay(grids, host)
        for name, buffer in metadata.tensors.items():
            buffer.copy_(host[name], non_blocking=True)

    def _lay(self, grids: Sequence[Grid], host: Mapping[str, Tensor]) -> None:
        """Each item's metadata behind that of the one before."""
        unit = tile = row = 0
        for grid in grids:
            own, order = self._laid_alone(grid)
            footprint = self.footprint(grid)
            for name, each in self.encoder.inputs.items():
                values = own[name] + tile if each.counts_tiles else own[name]
                host[name][unit : unit + footprint.segments] = values
            host["order"][row : row + footprint.rows] = order + unit * self.encoder.unit.rows
            unit, tile, row = unit + footprint.segments, tile + footprint.patches, row + footprint.rows

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        tiles = pixels.view(-1, self.geometry.channels, *self.geometry.tile)
        rows = self.encoder.encode_units(tiles, metadata.tensors).flatten(0, 1)
        return rows.index_select(0, metadata.tensors["order"])
