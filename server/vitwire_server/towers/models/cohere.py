"""Aya Vision and Command A Vision (Cohere)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.configs import Config
from vitwire_server.towers.layouts.tiles import TileFamily, side
from vitwire_server.towers.processors.settings import CLIP, images, whole
from vitwire_server.towers.processors.tiles import fits_tower, nearest_ratio, tiled
from vitwire_server.towers.shared.parts import projector
from vitwire_server.towers.shared.projected_tiles import ProjectedLayers, ProjectedTiles, whole_squares
from vitwire_server.towers.shared.siglip import siglip

_FACTOR = (whole_squares("downsample_factor"),)


def _aya_settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    return tiled(image, nearest_ratio(image, side(config.vision_config.image_size), cuts=True), CLIP)


def _command_settings(image: Mapping[str, Any], config: Config) -> Preprocessing:
    tile = (config.vision_config.image_size,) * 2
    fits_tower(image, tile[0])
    most = whole(image, "max_patches", 12) if image.get("crop_to_patches", True) else 1
    tiling = Tiling(TilingRule.LEAST_SCALING, tile, overview=Overview.LAST, max_tiles=most)
    return tiled(image, tiling, CLIP)


ROWS = (
    TileFamily(
        "aya_vision",
        "Aya Vision",
        tower=siglip("vision_tower."),
        beside=projector("aya_vision.AyaVisionMultiModalProjector", served=_FACTOR),
        encoder=ProjectedLayers,
        processor=images(_aya_settings),
    ),
    TileFamily(
        "cohere2_vision",
        "Command A Vision",
        tower=siglip("vision_tower."),
        beside=projector("cohere2_vision.Cohere2VisionMultiModalProjector", served=_FACTOR),
        encoder=partial(ProjectedTiles, merged_by="downsample_factor"),
        processor=images(_command_settings),
    ),
)
