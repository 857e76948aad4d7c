"""Images and clips prepared for a model, and the shapes that this gives; client and server share it."""

from collections.abc import Sequence
from typing import NamedTuple

from vitwire._images import ImageLike, clip_patches, clip_tiles, image_patches, image_tiles, read_image
from vitwire._model import Model
from vitwire._patches import Grid, Pixels, Preprocessor, Size, patch_shape
from vitwire._pictures import Picture, Tiles, outline, outline_resizer
from vitwire._sizes import resized
from vitwire._tiles import cut

__all__ = ["Form", "Model", "Preprocessor", "Tiles", "clip", "clip_form", "image", "image_form", "read_image"]


class Form(NamedTuple):
    """The grid of a prepared item, and the shapes of its pixels and crops."""

    grid: Grid
    pixels: tuple[int, ...]
    crops: tuple[int, ...] | None = None


def image(source: ImageLike, settings: Preprocessor) -> Tiles:
    """The pixels of one image. Raises ValueError, TypeError or OSError for one that cannot be used."""
    if settings.tiling:
        return image_tiles(source, settings, settings.tiling)
    return Tiles(*image_patches(source, settings))


def clip(frames: Pixels | Sequence[ImageLike], settings: Preprocessor) -> Tiles:
    """The pixels of one clip; frames are read one after the other. Raises as `image`."""
    if settings.tiling:
        return clip_tiles(frames, settings, settings.tiling)
    return Tiles(*clip_patches(frames, settings))


def image_form(size: Size, settings: Preprocessor) -> Form:
    """What `image` gives for an image of this height and width, without reading it. Raises ValueError."""
    if settings.tiling:
        blank = Picture(size, outline((*size, 3)), outline_resizer, settings.resample)
        tiles = cut(blank, settings.tiling)
        return Form(tiles.grid, tiles.pixels.shape, None if tiles.crops is None else tiles.crops.shape)
    return Form(*patch_shape(resized(*size, settings, settings.temporal_patch_size), (1, 1), settings))


def clip_form(size: Size, frames: int, settings: Preprocessor) -> Form:
    """What `clip` gives for so many frames of this height and width. Raises ValueError."""
    if settings.tiling:
        one = image_form(size, settings).pixels
        return Form((frames, 1, 1), (frames * one[0], *one[1:]))
    groups = -(-frames // settings.temporal_patch_size)
    slots = (groups, settings.temporal_patch_size)
    return Form(*patch_shape(resized(*size, settings, frames), slots, settings))
