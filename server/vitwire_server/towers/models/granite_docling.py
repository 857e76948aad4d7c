"""Granite for Docling (IBM)."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing, Resizing, TileGeometry
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Accepts, Family, Module, Parts, in_model
from vitwire_server.towers.layouts.tiles import Encoder, TileFamily, heads_of, merged_tile, side
from vitwire_server.towers.processors.settings import CLIP, ProcessorFiles, whole
from vitwire_server.towers.processors.tiles import fits_tower, tiled

_MOST_SIDE, _MOST_TILES = 16, 32
"""Tiles in a row or a column, which prompts have marks for, and tiles of a page where files say nothing."""


def _settings(files: ProcessorFiles, config: Config) -> dict[Modality, Preprocessing]:
    """Raises ValueError over pages that take the fine path, or that are of another size than the tower's tiles."""
    image, tile = files.image, side(config.vision_config.image_size)
    if image.get("fine_route"):
        raise ValueError("fine_route is true, but only the coarse path is served")
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
    return {Modality.IMAGE: replace(settings, resizing=Resizing.OTHER) if dense else settings}


def _layouts(fewest: int, most: int) -> tuple[tuple[int, int], ...]:
    """Rows and columns, by number of tiles and then by columns, which is the order that decides ties."""
    sides = range(1, min(most, _MOST_SIDE) + 1)
    pairs = [(rows, columns) for columns in sides for rows in sides if fewest <= rows * columns <= most]
    return tuple(sorted(pairs, key=lambda pair: pair[0] * pair[1]))


class GraniteDocling(Encoder):
    """A ViT with its connector; the connector merges the last layer and some inner ones alike."""

    def __init__(self, parts: Parts, config: Config) -> None:
        vision = config.vision_config
        size = side(vision.image_size)
        self.patch, self.merge = side(vision.patch_size), vision.scale_factor
        self.tile = merged_tile(size, self.patch, self.merge, "scale_factor")
        self.channels = vision.num_channels
        self._levels = len(vision.deepstack_visual_indexes)
        self.width = vision.out_hidden_size * (1 + self._levels)
        self.attention_heads = heads_of(vision)
        self._tower: Any = parts["tower"]
        self.blocks = list(self._tower.encoder.layers)

    @property
    def geometry(self) -> TileGeometry:
        return replace(super().geometry, levels=self._levels)

    def encode(self, tiles: Tensor) -> Tensor:
        output = self._tower(pixel_values=tiles)
        rows: Tensor = torch.cat([output.pooler_output, *output.deepstack_features], dim=-1)
        return rows.view(len(tiles), -1, self.width)


_GRANITE_DOCLING = TileFamily(
    model_type="granite_docling",
    title="Granite for Docling",
    architecture="12 x 768, patch 16",
    tower=Module(
        source="granite_docling.modeling_granite_docling:GraniteDoclingVisionModel",
        prefixes=in_model("vision_model."),
    ),
    encoder=GraniteDocling,
    processor=_settings,
    videos=Accepts.NOTHING,
    transformers="5.23.0",
    special="the coarse path; deepstack: rows are `[main, 0, 1, 2]`",
)

ROWS: tuple[Family, ...] = (_GRANITE_DOCLING,)
