"""The settings of a processor that cuts tiles."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vitwire_server.core.models import Preprocessing
from vitwire_server.core.tilings import Tiling, TilingRule
from vitwire_server.towers.processors.settings import BICUBIC, Normalisation, bounded


def tiled(
    config: Mapping[str, Any], tiling: Tiling, normalisation: Normalisation, resample: int = BICUBIC
) -> Preprocessing:
    """Settings with a tiling; `normalisation` and `resample` are the defaults of the processor's class."""
    area = tiling.tile[0] * tiling.tile[1]
    settings = bounded(config, (area, area * max(1, tiling.max_tiles)), normalisation, resample)
    return replace(settings, tiling=tiling)


def stretched(settings: Preprocessing, tile: tuple[int, int]) -> Preprocessing:
    """The same, of pictures that are one tile whatever their shape: frames of a clip."""
    return replace(settings, tiling=Tiling(TilingRule.STRETCH, tile))


def shade(mean: Sequence[float]) -> tuple[int, ...]:
    """The background that becomes nearly zero when it is normalised."""
    return tuple(int(value * 255) for value in mean)
