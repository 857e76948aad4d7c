"""Granite for Docling (IBM)."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vitwire_server.core.models import Preprocessing, Resizing, TileGeometry
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Parts, in_model
from vitwire_server.towers.layouts.tiles import TileFamily, side
from vitwire_server.towers.processors.settings import CLIP, images, whole
from vitwire_server.towers.processors.tiles import fits_tower, tiled
from vitwire_server.towers.shared.parts import stock
from vitwire_server.towers.shared.projected_tiles import ProjectedTiles

_MOST_SIDE, _MOST_TILES = 16, 32
"""Tiles in a row or a column, which prompts have marks for, and tiles of a page if files say nothing."""


def _granite_settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    tile = side(config.vision_config.image_size)
    if image.get("fine_route"):
        raise ValueError("unsupported fine_route; supported: the coarse path")
    fits_tower(image, tile)
    most = whole(image, "max_patches", _MOST_TILES) if image.get("crop_to_patches", True) else 1
    fewest = min(whole(image, "min_patches", 1), most)
    tiling = Tiling(
        TilingRule.CLOSEST_RATIO,
        (tile, tile),
        overview=Overview.LAST,
        min_tiles=fewest,
        max_tiles=most,
        layouts=_layouts(fewest, most),
    )
    settings = tiled(image, tiling, CLIP)
    dense = image.get("dense_max_patches") and (image.get("dense_max_scale") or image.get("dense_min_aspect"))
    return replace(settings, resizing=Resizing.OTHER) if dense else settings


def _layouts(fewest: int, most: int) -> tuple[tuple[int, int], ...]:
    """Rows and columns, by number of tiles and then by columns, which is the order that decides ties."""
    sides = range(1, min(most, _MOST_SIDE) + 1)
    pairs = [(rows, columns) for columns in sides for rows in sides if fewest <= rows * columns <= most]
    return tuple(sorted(pairs, key=lambda pair: pair[0] * pair[1]))


class GraniteDocling(ProjectedTiles):
    """A ViT with its connector; the connector merges the last layer and some inner ones alike."""

    def __init__(self, parts: Parts, config: Config) -> None:
        super().__init__(parts, config, merged_by="vision_config.scale_factor", width="vision_config.out_hidden_size")
        self._levels = len(config.vision_config.deepstack_visual_indexes)
        self.width *= 1 + self._levels

    @cached_property
    def geometry(self) -> TileGeometry:
        return replace(super().geometry, levels=self._levels)

    def encode(self, tiles: Tensor) -> Tensor:
        output = self._tower(pixel_values=tiles)
        rows: Tensor = torch.cat([output.pooler_output, *output.deepstack_features], dim=-1)
        return rows.view(len(tiles), -1, self.width)


ROWS = (
    TileFamily(
        "granite_docling",
        "Granite for Docling",
        tower=stock("granite_docling.GraniteDoclingVisionModel", in_model("vision_model.")),
        encoder=GraniteDocling,
        processor=images(_granite_settings),
        transformers="5.23.0",
    ),
)
