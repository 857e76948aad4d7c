"""Towers that see an image in two resolutions: both views are captured in one graph.

Either the tiles come as crops beside a larger view of the whole image, and there may be none of them;
or every tile comes in both sizes.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from vitwire_server.core.budgets import Budget
from vitwire_server.core.capacities import CropCapacities, TileCapacities
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.models import TileGeometry
from vitwire_server.towers.family import Parts
from vitwire_server.towers.layouts.tiles import Encoder, TileFamily, TileTower, View
from vitwire_server.towers.metadata import Capacity
from vitwire_server.towers.tower import Metadata, Tower


class CropEncoder(Encoder):
    """Views of whole images, and crops of them, each to rows of its own."""

    crop: View

    @abstractmethod
    def encode_crops(self, crops: Tensor) -> Tensor:
        """`(crops, C, h, w)` to `(crops, tokens, width)`."""

    @property
    def geometry(self) -> TileGeometry:
        return replace(super().geometry, crop=(self.crop.height, self.crop.width), crops_replace=True)


class PairEncoder(Encoder):
    """Tiles that come in two sizes and become one embedding."""

    crop: tuple[int, int]

    @abstractmethod
    def encode_pairs(self, tiles: Tensor, crops: Tensor) -> Tensor:
        """`(tiles, C, H, W)` and `(tiles, C, h, w)` to `(tiles, tokens, width)`."""

    def encode(self, tiles: Tensor) -> Tensor:
        raise TypeError(f"{len(tiles)} tiles alone are no pairs")

    @property
    def geometry(self) -> TileGeometry:
        return replace(super().geometry, crop=self.crop)


@dataclass(frozen=True, kw_only=True)
class CropFamily(TileFamily):
    """Rows whose encoder is a CropEncoder."""

    def build(self, parts: Parts, config: object) -> Tower:
        """See Family."""
        return CropTower(self.encoder(parts, config), parts)


@dataclass(frozen=True, kw_only=True)
class PairFamily(TileFamily):
    """Rows whose encoder is a PairEncoder."""

    def build(self, parts: Parts, config: object) -> Tower:
        """See Family."""
        return PairTower(self.encoder(parts, config), parts)


class PairTower(TileTower):
    """As many crops as tiles, in a budget as in an item."""

    encoder: PairEncoder

    def footprint(self, grid: Grid) -> Footprint:
        return super().footprint(grid)._replace(crops=grid.t)

    @property
    def capacities(self) -> TileCapacities:
        return TileCapacities(self.encoder.view.tokens, self._longest, paired=True)

    def capacity(self, budget: Budget) -> Capacity:
        return replace(super().capacity(budget), crops=budget.max_crops)

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        assert metadata.crops is not None, "a tower of two views is run with both"
        geometry = self.geometry
        tiles = pixels.view(-1, geometry.channels, *geometry.tile)
        crops = metadata.crops.view(-1, geometry.channels, *self.encoder.crop)
        return self.encoder.encode_pairs(tiles, crops).flatten(0, 1)


class CropTower(TileTower):
    """One view of each image, and crops of some of them; rows of an item are its crops', then its view's.

    A budget holds so many views and so many crops. Rows are brought into the items' order by an index
    that is laid out for each batch.
    """

    encoder: CropEncoder

    def footprint(self, grid: Grid) -> Footprint:
        crops = grid.t - 1
        tokens = self.encoder.view.tokens + crops * self.encoder.crop.tokens
        return Footprint(1, tokens, 1 + crops, self._longest, crops)

    @cached_property
    def capacities(self) -> CropCapacities:
        return CropCapacities(self.encoder.view.tokens, self.encoder.crop.tokens, self._longest)

    def sizes(self, most: int) -> list[int]:
        return [tokens for tokens in self.capacities.shares if tokens <= most]

    def samples(self, tokens: int, items: int) -> list[Grid]:
        views, crops = self.capacities.share(tokens)
        return [Grid(1 + crops, 1, max(1, crops)), *[Grid(1, 1, 1)] * (min(views, items) - 1)]

    def capacity(self, budget: Budget) -> Capacity:
        views = budget.max_segments - budget.max_crops
        return Capacity(views, budget.tokens, budget.max_segments, budget.max_segment_patches, crops=budget.max_crops)

    def reserve(self, capacity: Capacity) -> Metadata:
        order = torch.zeros(capacity.tokens, dtype=torch.int64, device=self.device)
        return Metadata(capacity, {"order": order}, {})

    def prepare(self, grids: Sequence[Grid], metadata: Metadata) -> None:
        super().prepare(grids, metadata)
        order = metadata.tensors["order"]
        host = torch.zeros(order.shape, dtype=torch.int64, pin_memory=order.is_cuda)
        view, crop, at = self.encoder.view.tokens, self.encoder.crop.tokens, 0
        views, crops = 0, metadata.capacity.patches * view
        for grid in grids:
            own = (grid.t - 1) * crop
            torch.arange(crops, crops + own, out=host[at : at + own])
            torch.arange(views, views + view, out=host[at + own : at + own + view])
            crops, views, at = crops + own, views + view, at + own + view
        order.copy_(host, non_blocking=True)

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        assert metadata.crops is not None, "a tower of two views is run with both"
        channels = self.geometry.channels
        rows = self.encoder.encode(pixels.view(-1, channels, *self.geometry.tile)).flatten(0, 1)
        if metadata.capacity.crops:
            crops = metadata.crops.view(-1, channels, self.encoder.crop.height, self.encoder.crop.width)
            rows = torch.cat([rows, self.encoder.encode_crops(crops).flatten(0, 1)])
        return rows.index_select(0, metadata.tensors["order"])
