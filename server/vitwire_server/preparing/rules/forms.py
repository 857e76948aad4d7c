"""Grids and shapes of prepared pictures, derived from their sizes alone."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from vitwire_server.preparing.rules.patches import CHANNELS, Grid, Size, patch_shape, resized
from vitwire_server.preparing.rules.recipe import Recipe
from vitwire_server.preparing.rules.sketches import Drawing, Frame, Sketch
from vitwire_server.preparing.rules.tiles import cut

_KEPT = 256
"""Drawings that are kept: one for each size of pictures."""


@lru_cache(_KEPT)
def drawing(size: Size, recipe: Recipe, frames: int | None = None) -> Drawing:
    """A sketch of each tile and crop of an image of this height and width, or of each of `frames` frames of a clip.

    The grid is that of the image, or of one frame. Raises ValueError for what the model's processor refuses.
    """
    settings = recipe.settings
    start = Sketch(Frame(size), (0, 0), size, settings.resample)
    if settings.tiling:
        return cut(start, settings.tiling)
    target = resized(*size, recipe, frames or recipe.temporal)
    return Drawing((1, target[0] // recipe.patch, target[1] // recipe.patch), (start.at(target),))


class Form(NamedTuple):
    """The grid of a prepared item, and the shapes of its pixels and crops."""

    grid: Grid
    pixels: tuple[int, ...]
    crops: tuple[int, ...] | None = None

    @property
    def area(self) -> int:
        """Pixels of three channels."""
        return sum(prod(shape) for shape in (self.pixels, self.crops) if shape) // CHANNELS


def form_of(picture: tuple[int, ...], recipe: Recipe) -> Form:
    """Form of a prepared picture `(H, W, channels)` or frames `(F, H, W, channels)`. Raises ValueError as `drawing`."""
    *clip, height, width, _ = picture
    frames = clip[0] if clip else None
    drawn = drawing((height, width), recipe, frames)
    if not recipe.settings.tiling:
        slots = (1, 1) if frames is None else (-(-frames // recipe.temporal), recipe.temporal)
        return Form(*patch_shape(drawn.tiles[0].size, slots, recipe))
    if frames is not None:
        return Form((frames, 1, 1), _stack(list(drawn.tiles) * frames))
    return Form(drawn.grid, _stack(drawn.tiles), _stack(drawn.crops) if drawn.crops else None)


def _stack(tiles: Sequence[Sketch]) -> tuple[int, ...]:
    return len(tiles), CHANNELS, *tiles[0].size
