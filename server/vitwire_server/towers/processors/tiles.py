"""The settings of a processor that cuts tiles."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.towers.processors.settings import BICUBIC, Normalisation, bounded, per_channel, square, whole

_RESIZING = (
    TilingRule.STRETCH,
    TilingRule.CENTER_CROP,
    TilingRule.STRETCHED_CROP,
    TilingRule.SQUARE,
    TilingRule.WHOLE_TILES,
)
"""Rules whose tiles are not of one size unless images are resized."""


def tiled(
    config: Mapping[str, Any], tiling: Tiling, normalisation: Normalisation, resample: int = BICUBIC
) -> Preprocessing:
    """Settings with a tiling; `normalisation` and `resample` are the defaults of the processor's class.

    Raises ValueError if the file says not to resize images, which the rule does.
    """
    if not config.get("do_resize", True) and tiling.rule in _RESIZING:  # processors take null as false
        raise ValueError(f"unsupported do_resize: {json.dumps(config['do_resize'])}")
    area = tiling.tile[0] * tiling.tile[1]
    settings = bounded(config, (area, area * max(1, tiling.max_tiles)), normalisation, resample)
    return replace(settings, tiling=tiling)


def stretched(settings: Preprocessing, tile: tuple[int, int]) -> Preprocessing:
    """The same, of pictures that are one tile whatever their shape: frames of a clip."""
    return replace(settings, tiling=Tiling(TilingRule.STRETCH, tile))


def squared(config: Mapping[str, Any], side: int, normalisation: Normalisation) -> Preprocessing:
    """Settings of a processor that fits an image into one tile in its own shape, on its mean colour."""
    tiling = Tiling(
        TilingRule.SQUARE,
        (side, side),
        background=shade(per_channel(config, "image_mean", normalisation[0])),
        min_side=whole(config, "min_size", 14),
    )
    return tiled(config, tiling, normalisation)


def fits_tower(config: Mapping[str, Any], side: int) -> None:
    """Raises ValueError over a size of the file that is not `side`, that of the tower's tiles."""
    if (own := square(config, default=side)) != side:
        raise ValueError(f"size is {own}, but must be the tower's image_size, {side}")


def nearest_ratio(config: Mapping[str, Any], side: int, *, cuts: bool) -> Tiling:
    """How GOT-OCR 2's processor cuts, which several models use; `cuts` is whether theirs does by default.

    Raises ValueError over tiles of another size than `side`.
    """
    fits_tower(config, side)
    if not config.get("crop_to_patches", cuts):
        return Tiling(TilingRule.STRETCH, (side, side))
    return Tiling(
        TilingRule.CLOSEST_RATIO,
        (side, side),
        overview=Overview.LAST,
        min_tiles=whole(config, "min_patches", 1),
        max_tiles=whole(config, "max_patches", 12),
    )


def shade(mean: Sequence[float]) -> tuple[int, ...]:
    """The background that becomes nearly zero when it is normalised."""
    return tuple(int(value * 255) for value in mean)
