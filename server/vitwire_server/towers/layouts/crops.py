"""Towers that take crops beside tiles, both in one graph.

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
from vitwire_server.core.capacities import CropCapacities, TileCapacities
from vitwire_server.core.footprints import CropFootprints, TileFootprints
from vitwire_server.core.grids import Grid
from vitwire_server.core.models import TileGeometry
from vitwire_server.towers.family import Parts
from vitwire_server.towers.layouts.tiles import Encoder, TileShape, TileTower
from vitwire_server.towers.metadata import Capacity
from vitwire_server.towers.tower import Metadata


class CropEncoder(Encoder):
    """Overviews of images, and crops of them, each to its own rows."""

    crop: TileShape

    def tower(self, parts: Parts) -> TileTower:
        return CropTower(self, parts)

    @abstractmethod
    def encode_crops(self, crops: Tensor) -> Tensor:
        """`(crops, C, h, w)` to `(crops, tokens, width)`."""

    @property
    def geometry(self) -> TileGeometry:
        return replace(super().geometry, crop=(self.crop.height, self.crop.width), crops_replace=True)


class PairEncoder(Encoder):
    """Tiles that come in two sizes and become one embedding."""

    crop: tuple[int, int]

    def tower(self, parts: Parts) -> TileTower:
        return PairTower(self, parts)

    @abstractmethod
    def encode_pairs(self, tiles: Tensor, crops: Tensor) -> Tensor:
        """`(tiles, C, H, W)` and `(tiles, C, h, w)` to `(tiles, tokens, width)`."""

    def encode(self, tiles: Tensor) -> Tensor:
        raise TypeError(f"{len(tiles)} tiles alone are no pairs")

    @property
    def geometry(self) -> TileGeometry:
        return replace(super().geometry, crop=self.crop)


class PairTower(TileTower):
    """As many crops as tiles, in a budget as in an item."""

    encoder: PairEncoder

    @cached_property
    def footprints(self) -> TileFootprints:
        return TileFootprints(self.encoder.tile.tokens, self._longest, paired=True)

    @property
    def capacities(self) -> TileCapacities:
        return TileCapacities(self.encoder.tile.tokens, self._longest, paired=True)

    def capacity(self, budget: Budget) -> Capacity:
        return replace(super().capacity(budget), crops=budget.max_crops)

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        assert metadata.crops is not None, "this tower is run with crops"
        geometry = self.geometry
        tiles = pixels.view(-1, geometry.channels, *geometry.tile)
        crops = metadata.crops.view(-1, geometry.channels, *self.encoder.crop)
        return self.encoder.encode_pairs(tiles, crops).flatten(0, 1)


class CropTower(TileTower):
    """An overview of each image, and crops of some of them; rows of an item are its crops', then its overview's.

    A budget holds so many overviews and so many crops. Rows are brought into the items' order by an index
    that is laid out for each batch.
    """

    encoder: CropEncoder

    @cached_property
    def footprints(self) -> CropFootprints:
        return CropFootprints(self.encoder.tile.tokens, self.encoder.crop.tokens, self._longest)

    @cached_property
    def capacities(self) -> CropCapacities:
        return CropCapacities(self.encoder.tile.tokens, self.encoder.crop.tokens, self._longest)

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
        overview, crop, at = self.encoder.tile.tokens, self.encoder.crop.tokens, 0
        overviews, crops = 0, metadata.capacity.patches * overview
        for grid in grids:
            own = (grid.t - 1) * crop
            torch.arange(crops, crops + own, out=host[at : at + own])
            torch.arange(overviews, overviews + overview, out=host[at + own : at + own + overview])
            crops, overviews, at = crops + own, overviews + overview, at + own + overview
        order.copy_(host, non_blocking=True)

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        assert metadata.crops is not None, "this tower is run with crops"
        channels = self.geometry.channels
        rows = self.encoder.encode(pixels.view(-1, channels, *self.geometry.tile)).flatten(0, 1)
        if metadata.capacity.crops:
            crops = metadata.crops.view(-1, channels, self.encoder.crop.height, self.encoder.crop.width)
            rows = torch.cat([rows, self.encoder.encode_crops(crops).flatten(0, 1)])
        return rows.index_select(0, metadata.tensors["order"])
