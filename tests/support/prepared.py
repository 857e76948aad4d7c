"""Pictures, files and clips prepared in this process, as client and server do it together, and recipes by hand."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitwire import Item
from vitwire._inputs.sources import pixels_of, pixels_of_frames
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing, Resizing
from vitwire_server.core.pooling import Pooling
from vitwire_server.core.sampling import Sampling, SamplingRule
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.preparing import pillow
from vitwire_server.preparing.device.tables import Axis, Field, Memory, Program
from vitwire_server.preparing.pillow import Tiles
from vitwire_server.preparing.rules.recipe import Recipe, recipes_of

ROWS = (Memory.PIXELS, Memory.CROPS)
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "AVIF", "TIFF", "ICO", "JPEG2000")
_SHAPE = {"patch": 14, "merge": 1, "temporal": 1, "raster": False, "channels_last": False}
_SETTINGS: dict[str, Any] = {
    "min_pixels": 1, "max_pixels": 1, "mean": (0.5,) * 3, "std": (0.5,) * 3, "rescale_factor": 1 / 255, "resample": 3,
}  # fmt: skip


def photograph(height: int, width: int) -> Image.Image:
    """A slope with noise on it."""
    ramp = np.add.outer(np.arange(height) * 3, np.arange(width))[..., None] * [1, 2, 5]
    noise = np.random.default_rng(height).integers(0, 60, (height, width, 3))
    return Image.fromarray(((ramp % 196) + noise).astype(np.uint8))


def recipe(**changes: Any) -> Recipe:
    """A recipe by hand: fields of `Recipe` and of `Preprocessing`."""
    shape = {name: changes.pop(name, value) for name, value in _SHAPE.items()}
    return Recipe(Preprocessing(**_SETTINGS | changes), **shape)


def tiled(tiling: Tiling, resample: int = 3) -> Recipe:
    """A recipe that cuts tiles."""
    return recipe(tiling=tiling, resample=resample)


def recipes(folder: Path, pooling: Pooling = Pooling.NONE) -> Mapping[Modality, Recipe]:
    """The recipes of a checkpoint, of the modalities that are prepared."""
    from broken import load  # noqa: PLC0415  # takes seconds, and programs with recipes by hand do without
    from vitwire_server.towers.checkpoints.checkpoint import open_checkpoint  # noqa: PLC0415  # as above

    settings = open_checkpoint(str(folder)).pooled(pooling).preprocessing()
    return recipes_of(settings, load(folder, pooling).tower.geometry)


def image(source: Any, recipe: Recipe) -> Tiles:
    """What becomes of an image: a path, a Pillow image or an array."""
    if isinstance(source, str | os.PathLike):
        with Path(source).open("rb") as file:
            return pillow.image(pillow.read(file, recipe, FORMATS), recipe)
    return pillow.prepared(pixels_of(source), recipe)


def clip(frames: Any, recipe: Recipe) -> Tiles:
    """What becomes of a clip: an array or a sequence of Pillow images or arrays."""
    return pillow.prepared(pixels_of_frames(frames), recipe)


def patches(source: Any, recipe: Recipe) -> tuple[Any, tuple[int, int, int]]:
    """The rows and grid of an image in patches."""
    made = image(source, recipe)
    return made.pixels, made.grid


def clip_patches(frames: Sequence[Any], recipe: Recipe) -> tuple[Any, tuple[int, int, int]]:
    """The rows and grid of a clip in patches."""
    made = clip(frames, recipe)
    return made.pixels, made.grid


def image_items(images: Sequence[Any], recipe: Recipe) -> list[Item]:
    """Items of images with uint8 pixels and a grid, as a client has them that uses the model's processor."""
    made = [image(each, recipe) for each in images]
    return [Item(each.pixels, each.grid, crops=each.crops) for each in made]


def clip_items(clips: Sequence[Any], recipe: Recipe) -> list[Item]:
    """The same for clips."""
    made = [clip(each, recipe) for each in clips]
    return [Item(each.pixels, each.grid, "video") for each in made]


def of_images(folder: Path) -> Recipe:
    """The recipe of a checkpoint's images."""
    return recipes(folder)[Modality.IMAGE]


def of_clips(folder: Path) -> Recipe:
    """The recipe of a checkpoint's clips."""
    return recipes(folder)[Modality.VIDEO]


# -- a recipe of every rule --------------------------------------------------------------------------

Recipes = dict[Modality, Recipe]
SAMPLING = Sampling(SamplingRule.RATE_TO_LAST, fps=2.0, min_frames=4, max_frames=16)
AREAS = {"min_pixels": 64 * 64, "max_pixels": 256 * 256}
PACKED = {"patch": 16, "merge": 2, "temporal": 2}


def _tiling(rule: TilingRule, **settings: Any) -> Recipes:
    tile = (56, 56)
    return {
        Modality.IMAGE: recipe(tiling=Tiling(rule, tile, **settings)),
        Modality.VIDEO: recipe(tiling=Tiling(TilingRule.STRETCH, tile), sampling=SAMPLING),
    }


CROP = (40, 40)
FIRST, LAST = Overview.FIRST, Overview.LAST
MODELS: dict[str, Recipes] = {
    "patches": {
        Modality.IMAGE: recipe(**PACKED, **AREAS),
        Modality.VIDEO: recipe(**PACKED, max_pixels=8 * 128**2, sampling=SAMPLING, bounds_span_frames=True),
    },
    "raster": {
        Modality.IMAGE: recipe(
            raster=True, channels_last=True, **AREAS, resizing=Resizing.MOST_PATCHES, drops_transparency=True
        )
    },
    "ratio": _tiling(TilingRule.CLOSEST_RATIO, overview=LAST, max_tiles=6),
    "two ratios": _tiling(TilingRule.TWO_RATIOS, max_tiles=6),
    "ratio and area": _tiling(TilingRule.RATIO_AND_AREA, overview=LAST, max_tiles=6),
    "best fit": _tiling(TilingRule.BEST_FIT, overview=FIRST, max_tiles=4, layouts=((1, 2), (2, 1), (2, 2))),
    "padded fit": _tiling(
        TilingRule.PADDED_FIT, overview=FIRST, background=(9, 8, 7), layouts=((1, 1), (2, 1), (2, 2))
    ),
    "canvas": _tiling(TilingRule.CANVAS, overview=LAST, max_tiles=5),
    "covering": _tiling(TilingRule.COVERING, overview=FIRST, max_tiles=6),
    "parts": _tiling(TilingRule.COVERING_PARTS, overview=FIRST, max_tiles=6),
    "corner": _tiling(TilingRule.CORNER, min_side=24, patch=8),
    "stretched": _tiling(TilingRule.STRETCHED_CROP, min_side=64),
    "square": _tiling(TilingRule.SQUARE, background=(9, 8, 7), min_side=14, crop=(96, 96), crop_background=(1, 2, 3)),
    "overlapping": _tiling(TilingRule.OVERLAPPING, max_tiles=6, margin=16),
    "windows": _tiling(TilingRule.WINDOWS, max_tiles=20, max_side=300, crop=CROP),
    "crops": _tiling(TilingRule.CLOSEST_RATIO, min_tiles=2, max_tiles=6, crop=CROP),
}


def within(made: Program, frame: int) -> None:
    """Passes read a frame of this many bytes, or planes that levels before them wrote, and write rows or new planes."""
    lengths = {memory: made.rows[index] * made.columns[index] for index, memory in enumerate(ROWS)}
    planes: list[range] = []
    for level, table in enumerate((*made.levels, made.last)):
        targets = made.targets if level == len(made.levels) else [Memory.SCRATCH] * len(table)
        written: list[range] = []
        for row, source, target in zip(table, made.sources[level], targets, strict=True):
            read, own = _read(row), _written(row)
            assert any(read.start in each and read[-1] in each for each in planes) or source is Memory.FRAME
            assert source is Memory.SCRATCH or read[-1] < frame
            assert own[-1] < lengths.get(target, made.scratch)
            if target is Memory.SCRATCH:
                assert not any(own.start < each.stop and each.start < own.stop for each in (*planes, *written))
                written.append(own)
        planes += written


def _read(row: np.ndarray) -> range:
    shape = [row[Field.HEIGHT], row[Field.WIDTH], 3]
    if row[Field.AXIS] != Axis.NONE:
        shape[row[Field.AXIS]] = row[Field.LAST] + 1
    strides = (Field.SOURCE_DOWN, Field.SOURCE_RIGHT, Field.SOURCE_CHANNEL)
    return _places(row[Field.SOURCE], shape, [row[field] for field in strides])


def _written(row: np.ndarray) -> range:
    height, width = row[Field.CELL_HEIGHT], row[Field.CELL_WIDTH]
    shape = [row[Field.DOWN] * row[Field.ACROSS] // (height * width), height, width, 3]
    strides = (Field.TARGET_ROW, Field.TARGET_DOWN, Field.TARGET_RIGHT, Field.TARGET_CHANNEL)
    return _places(row[Field.TARGET], shape, [row[field] for field in strides])


def _places(start: int, shape: list[int], strides: list[int]) -> range:
    return range(int(start), int(start + np.dot(np.array(shape) - 1, strides) + 1))
