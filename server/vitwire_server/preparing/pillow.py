"""Pictures prepared by Pillow and numpy: the reference, and the way on a CPU. Pixels stay uint8."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import IO, TypeAlias

import numpy as np
from PIL import Image, ImageOps

from vitwire_server.core.decoding import MAX_PICTURE_PIXELS
from vitwire_server.preparing.rules.forms import drawing
from vitwire_server.preparing.rules.patches import CHANNELS, Grid, Pixels, Size, patch_rows
from vitwire_server.preparing.rules.recipe import Recipe
from vitwire_server.preparing.rules.sketches import Canvas, Frame, Sketch

AnyPicture: TypeAlias = Image.Image | Pixels
"""A picture in RGB."""

_AXES_OF_IMAGE = 3


@dataclass(frozen=True, slots=True)
class Tiles:
    """Prepared pixels of one item: patches, or tiles `(tiles, 3, H, W)`; its grid, and its crops, if any."""

    pixels: Pixels
    grid: Grid
    crops: Pixels | None = None


def prepared(pixels: Pixels, recipe: Recipe) -> Tiles:
    """A picture `(H, W, 3 or 4)`, or frames `(F, H, W, 3)`, as `image` or `clip` prepare them. Raises as these."""
    if pixels.ndim == _AXES_OF_IMAGE:
        return image(flattened(pixels, recipe), recipe)
    return clip((flattened(frame, recipe) for frame in pixels), len(pixels), recipe)


def image(picture: AnyPicture, recipe: Recipe) -> Tiles:
    """Patches `(h*w, C*p*p)` of an image with the grid `(1, h, w)`, or its tiles and crops.

    The frame axis, along which the processor only duplicates the image, is omitted.
    Raises ValueError for an image that the model's processor refuses.
    """
    drawn = drawing(_size(picture), recipe)
    if recipe.settings.tiling:
        artist = _Artist(np.asarray(picture))
        return Tiles(artist.stacked(drawn.tiles), drawn.grid, artist.stacked(drawn.crops) if drawn.crops else None)
    whole = drawn.tiles[0]
    return Tiles(*patch_rows([_Artist(picture).pixels(whole)], whole.size, (1, 1), recipe))


def clip(frames: Iterable[AnyPicture], count: int, recipe: Recipe) -> Tiles:
    """Patches `(t*h*w, C*T*p*p)` of `count` frames with the grid `(t, h, w)`, t = ceil(count / T); or a tile each.

    The last frame is repeated until T divides their number. Frames are of one size, and read one at a time. Raises
    ValueError as `image`.
    """
    if recipe.settings.tiling:
        tiles = [image(frame, recipe).pixels for frame in frames]
        return Tiles(np.concatenate(tiles), (len(tiles), 1, 1))
    pictures = iter(frames)
    first = next(pictures)
    whole = drawing(_size(first), recipe, count).tiles[0]
    at_size = (_Artist(frame).pixels(whole) for frame in chain([first], pictures))
    return Tiles(*patch_rows(at_size, whole.size, (-(-count // recipe.temporal), recipe.temporal), recipe))


class _Artist:
    """Draws sketches of a picture; each canvas once."""

    def __init__(self, picture: AnyPicture) -> None:
        self._picture = picture
        self._drawn: dict[Canvas, Pixels] = {}

    def stacked(self, sketches: Sequence[Sketch]) -> Pixels:
        """`(tiles, 3, H, W)`"""
        return np.ascontiguousarray(np.stack([self.pixels(each) for each in sketches]).transpose(0, 3, 1, 2))

    def pixels(self, sketch: Sketch) -> Pixels:
        """`(H, W, 3)`"""
        return np.asarray(self._part(sketch))

    def _part(self, sketch: Sketch) -> AnyPicture:
        whole = self._picture if isinstance(sketch.of, Frame) else self._canvas(sketch.of)
        if sketch.size == sketch.of.whole:
            return whole
        (top, left), (height, width) = sketch.corner, sketch.size
        return np.asarray(whole)[top : top + height, left : left + width]

    def _canvas(self, canvas: Canvas) -> Pixels:
        if canvas not in self._drawn:
            source = self._part(canvas.source)
            if canvas.source.size != canvas.size:
                height, width = canvas.size
                whole = Image.fromarray(source) if isinstance(source, np.ndarray) else source
                source = whole.resize((width, height), canvas.resample)
            self._drawn[canvas] = _placed(np.asarray(source), canvas)
        return self._drawn[canvas]


def _placed(pixels: Pixels, canvas: Canvas) -> Pixels:
    if canvas.size == canvas.whole:
        return pixels
    (top, left), (height, width) = canvas.corner, canvas.size
    placed: Pixels = np.empty((*canvas.whole, CHANNELS), np.uint8)
    placed[:] = canvas.background or 0
    placed[top : top + height, left : left + width] = pixels
    return placed


def _size(picture: AnyPicture) -> Size:
    return picture.shape[:2] if isinstance(picture, np.ndarray) else (picture.height, picture.width)


# -- to RGB ----------------------------------------------------------------------------------------


def flattened(pixels: Pixels, recipe: Recipe) -> Pixels:
    """A picture `(H, W, 3)`, a view if it can be, of one with 3 or 4 channels; the fourth is alpha.

    Transparency is dropped or becomes white, as the model's processor has it.
    """
    if pixels.shape[-1] == 3 or recipe.settings.drops_transparency:
        return pixels[..., :3]
    alpha = pixels[..., 3:].astype(np.uint16)
    blend = alpha * pixels[..., :3] + (255 - alpha) * 255
    return ((blend + 127) // 255).astype(np.uint8)  # at most 65152; never halfway between two values


def read(file: IO[bytes], recipe: Recipe, formats: tuple[str, ...]) -> Image.Image:
    """The image in a file, turned upright by EXIF, in RGB; transparency as of a picture that was `flattened`.

    formats: the formats that are accepted, by Pillow's names. Raises anything over broken files.
    """
    image: Image.Image = Image.open(file, formats=formats)
    if image.width * image.height > MAX_PICTURE_PIXELS:
        raise ValueError(f"{image.width}x{image.height} exceeds the limit of {MAX_PICTURE_PIXELS} pixels")
    ImageOps.exif_transpose(image, in_place=True)
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    if recipe.settings.drops_transparency:
        return image.convert("RGB")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image)
    return white
