"""Random pictures of a size, and the pixels that a processor would return for them."""

import io
import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from vitwire import Item, Model
from vitwire.items import Modality

Grid = tuple[int, int, int]
GridOf = Callable[[Item], Grid]
"""Sends a picture, and returns the grid that the server chose."""
Form = Literal["pixels", "picture", "jpeg"]
"""pixels: what a processor returns; picture: RGB in memory; jpeg: a file of it. The server prepares the latter two."""

_COARSE = 16
"""Pixels for each value of a picture's low frequencies."""
_NOISE = 8


def check_prepared(model: Model, frames: int) -> None:
    """Raises ValueError if the server prepares no pictures, or no clips."""
    modality, what = ("video", "clips") if frames else ("image", "pictures")
    if modality not in model.prepared:
        raise ValueError(
            f"--size: this server prepares no {what} of {model.model_type}, so that the grid of a size is not known; "
            "use --trace"
        )


def random_item(height: int, width: int, frames: int, form: Form, model: Model, grid_of: GridOf, seed: int = 0) -> Item:
    """A random image, or a clip if `frames` is not 0, of uint8 values; its shape is that of the grid if form is pixels.

    Raises ValueError for a JPEG if Pillow is not installed.
    """
    if form == "jpeg":
        return Item(encoded=_jpeg(height, width, seed))
    modality: Modality = "video" if frames else "image"
    shape = (frames, height, width, 3) if frames else (height, width, 3)
    picture = Item(_random(shape, seed), modality=modality)
    return picture if form == "picture" else item_of(grid_of(picture), modality, model, seed)


def item_of(grid: Grid, modality: Modality, model: Model, seed: int = 0) -> Item:
    """Random pixels of the shape that a processor returns for a grid, and crops if the model takes them."""
    if model.tiles is None:
        frames = model.temporal_patch_size if modality == "video" else 1
        shape = (math.prod(grid), model.channels * frames * model.patch_size**2)
        return Item(_random(shape, seed), grid, modality)
    tiles, crops = tile_counts(grid, model)
    pixels = _random((tiles, model.channels, *model.tiles.tile), seed)
    if not crops:
        return Item(pixels, grid, modality)
    assert model.tiles.crop is not None
    return Item(pixels, grid, modality, crops=_random((crops, model.channels, *model.tiles.crop), seed))


def tile_counts(grid: Grid, model: Model) -> tuple[int, int]:
    """Tiles and crops of a grid. Where images are cut into crops, one tile shows the whole image."""
    assert model.tiles is not None
    if model.tiles.crop is None:
        return grid[0], 0
    return (grid[0], grid[0]) if model.tiles.single else (1, grid[0] - 1)


def _random(shape: tuple[int, ...], seed: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def _jpeg(height: int, width: int, seed: int) -> bytes:
    """A file with low frequencies and some noise, as a photograph has; noise alone would be several times as large."""
    try:
        from PIL import Image  # noqa: PLC0415  # only this form needs it
    except ImportError as error:
        raise ValueError("--as jpeg: Pillow is not installed: pip install pillow") from error
    coarse = _random((-(-height // _COARSE), -(-width // _COARSE), 3), seed)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noise = np.random.default_rng((seed, 1)).integers(-_NOISE, _NOISE + 1, smooth.shape, np.int16)
    file = io.BytesIO()
    Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()
