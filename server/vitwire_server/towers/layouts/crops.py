"""Towers that take crops in addition to tiles, both in one graph.

Either an image is an overview, which is a tile, and any number of crops of another size; or each of its
tiles is paired with a crop, the same picture in another size.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

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


class PairEncoder(TileTower):
    """Tiles that come in two sizes and become one embedding: as many crops as tiles, in a budget as in an item."""

    crop: tuple[int, int]
    paired = True

    @abstractmethod
    def encode_pairs(self, tiles: Tensor, crops: Tensor) -> Tensor:
        """`(tiles, C, H, W)` and `(tiles, C, h, w)` to `(tiles, tokens, width)`."""

    @cached_property
    def geometry(self) -> TileGeometry:
        return replace(super().geometry, crop=self.crop)

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        assert metadata.crops is not None, "this tower is run with crops"
        crops = metadata.crops.view(-1, self.channels, *self.crop)
        return self.encode_pairs(self.tiles(pixels), crops).flatten(0, 1)


class CropEncoder(TileTower):
    """An overview of each image, and crops of some of them; rows of an item are its crops', then its overview's.

    A budget holds a number of overviews and a number of crops. Rows are brought into the items' order by an index
    that is laid out for each batch.
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

    def reserve(self, capacity: Capacity) -> Metadata:
        order = torch.zeros(capacity.tokens, dtype=torch.int64, device=self.device)
        return Metadata(capacity, {"order": order}, {})

    def prepare(self, grids: Sequence[Grid], metadata: Metadata) -> None:
        super().prepare(grids, metadata)
        order = metadata.tensors["order"]
        host = torch.zeros(order.shape, dtype=torch.int64, pin_memory=order.is_cuda)
        overview, crop, at = self.tile.tokens, self.crop.tokens, 0
        overviews, crops = 0, metadata.capacity.patches * overview
        for grid in grids:
            own = (grid.t - 1) * crop
            torch.arange(crops, crops + own, out=host[at : at + own])
            torch.arange(overviews, overviews + overview, out=host[at + own : at + own + overview])
            crops, overviews, at = crops + own, overviews + overview, at + own + overview
        order.copy_(host, non_blocking=True)

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        assert metadata.crops is not None, "this tower is run with crops"
        rows = self.encode(self.tiles(pixels)).flatten(0, 1)
        if metadata.capacity.crops:
            crops = metadata.crops.view(-1, self.channels, self.crop.height, self.crop.width)
            rows = torch.cat([rows, self.encode_crops(crops).flatten(0, 1)])
        return rows.index_select(0, metadata.tensors["order"])
