"""Pictures that only remember how they are made: the rules run over sketches, and kernels over what was sketched.

A canvas is a box of a picture, resized and placed on a background. A rule that resizes a canvas again makes one whose
source is the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, cast

from vitwire_server.preparing.rules.patches import CHANNELS, Grid, Pixels, Size
from vitwire_server.preparing.rules.pictures import Picture
from vitwire_server.preparing.rules.recipe import Recipe
from vitwire_server.preparing.rules.sizes import resized
from vitwire_server.preparing.rules.tiles import cut


class Frame(NamedTuple):
    """The picture that preparation starts from."""

    whole: Size


class Canvas(NamedTuple):
    """A box of a picture, resized and placed; equal canvases have equal pixels."""

    source: "Box"
    size: Size
    """Of the resized box."""
    resample: int
    corner: Size
    """Of the resized box on the canvas."""
    whole: Size
    """Of the canvas."""
    background: tuple[int, ...]


class Box(NamedTuple):
    """A rectangle of a picture."""

    of: Frame | Canvas
    corner: Size
    size: Size


Boxes: TypeAlias = tuple[Box, ...]


class Drawing(NamedTuple):
    """What becomes of a picture: its grid, and the rectangles that its pixels and crops are made of."""

    grid: Grid
    pixels: Boxes
    """One for each tile, or the whole resized frame of a model that takes patches."""
    crops: Boxes = ()


@dataclass(frozen=True, slots=True)
class Sketch:
    """A rectangle as the rules handle it: a canvas of `rules.pictures`."""

    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """`(H, W, 3)`."""
        return (*self.box.size, CHANNELS)

    def __getitem__(self, index: tuple[slice, slice]) -> "Sketch":
        """A part; slices count from the rectangle's corner, and end at its border as those of arrays do."""
        (top, bottom, _), (left, right, _) = (
            each.indices(length) for each, length in zip(index, self.box.size, strict=True)
        )
        corner = (self.box.corner[0] + top, self.box.corner[1] + left)
        return Sketch(Box(self.box.of, corner, (bottom - top, right - left)))

    def resized(self, size: Size, resample: int) -> "Sketch":
        """The rectangle at a size; itself if it has that size."""
        if self.box.size == size:
            return self
        return _whole(Canvas(self.box, size, resample, (0, 0), size, ()))

    def placed(self, size: Size, corner: Size, background: tuple[int, ...]) -> "Sketch":
        """See `rules.pictures.Canvas`."""
        of = self.box.of
        if isinstance(of, Canvas) and of.whole == of.size == self.box.size:
            return _whole(of._replace(corner=corner, whole=size, background=background))
        return _whole(Canvas(self.box, self.box.size, 0, corner, size, background))

    def stacked(self, tiles: Sequence[Pixels]) -> Pixels:
        """See `rules.pictures.Canvas`."""
        return cast("Pixels", tuple(_sketch(tile).box for tile in tiles))


def drawing(size: Size, recipe: Recipe, frames: int | None = None) -> Drawing:
    """What becomes of an image of this height and width, or of each of `frames` frames of a clip.

    The grid is that of the image, or of one frame. Raises ValueError for what the model's processor refuses.
    """
    start = Sketch(Box(Frame(size), (0, 0), size))
    settings = recipe.settings
    if not settings.tiling:
        target = resized(*size, recipe, frames or recipe.temporal)
        grid = (1, target[0] // recipe.patch, target[1] // recipe.patch)
        return Drawing(grid, (start.resized(target, settings.resample).box,))
    tiles = cut(Picture(size, _pixels(start), _resizer, settings.resample), settings.tiling)
    return Drawing(tiles.grid, _boxes(tiles.pixels), () if tiles.crops is None else _boxes(tiles.crops))


def _whole(canvas: Canvas) -> Sketch:
    return Sketch(Box(canvas, (0, 0), canvas.whole))


def _resizer(pixels: Pixels, size: Size, resample: int) -> Pixels:
    return _pixels(_sketch(pixels).resized(size, resample))


def _pixels(sketch: Sketch) -> Pixels:
    """The rules take it for an array: they only cut it, and leave the rest to its methods."""
    return cast("Pixels", sketch)


def _sketch(pixels: Pixels) -> Sketch:
    assert isinstance(pixels, Sketch), "of which the rules were begun"
    return pixels


def _boxes(pixels: Pixels) -> Boxes:
    return cast("Boxes", pixels)
