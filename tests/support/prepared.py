"""Pictures, files and clips prepared in this process, as client and server do it together, and recipes by hand."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vitwire import Item
from vitwire._pictures import pixels_of, pixels_of_frames
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.pooling import Pooling
from vitwire_server.core.tilings import Tiling
from vitwire_server.preparing import pillow
from vitwire_server.preparing.rules.pictures import Tiles
from vitwire_server.preparing.rules.recipe import Recipe, recipes_of
from vitwire_server.towers.checkpoints.checkpoint import load_tower, open_checkpoint

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
_SHAPE = {"patch": 14, "merge": 1, "temporal": 1, "raster": False, "channels_last": False}
_SETTINGS = {
    "min_pixels": 1, "max_pixels": 1, "mean": (0.5,) * 3, "std": (0.5,) * 3, "rescale_factor": 1 / 255, "resample": 3,
}  # fmt: skip


def recipe(**changes: Any) -> Recipe:
    """A recipe by hand: fields of `Recipe` and of `Preprocessing`."""
    shape = {name: changes.pop(name, value) for name, value in _SHAPE.items()}
    return Recipe(Preprocessing(**_SETTINGS | changes), **shape)


def tiled(tiling: Tiling, resample: int = 3) -> Recipe:
    """A recipe that cuts tiles."""
    return recipe(tiling=tiling, resample=resample)


def recipes(folder: Path, pooling: Pooling = Pooling.NONE) -> Mapping[Modality, Recipe]:
    """The recipes of a checkpoint, of the modalities that are prepared."""
    checkpoint = open_checkpoint(str(folder)).pooled(pooling)
    tower = load_tower(
        checkpoint, dtype=torch.float32, device=torch.device("cpu"), track=lambda shards, *_: shards
    ).tower
    return recipes_of(checkpoint.preprocessing(), tower.geometry)


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
