"""The shapes that preparation gives, without pixels."""

from math import prod
from typing import NamedTuple

from vitwire_server.preparing.rules.patches import CHANNELS, Grid, Size, patch_shape
from vitwire_server.preparing.rules.pictures import Picture, outline, outline_resizer
from vitwire_server.preparing.rules.recipe import Recipe
from vitwire_server.preparing.rules.sizes import resized
from vitwire_server.preparing.rules.tiles import cut


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
    """What a picture `(H, W, channels)`, or frames `(F, H, W, channels)`, become. Raises ValueError as `image_form`."""
    *frames, height, width, _ = picture
    return clip_form((height, width), frames[0], recipe) if frames else image_form((height, width), recipe)


def image_form(size: Size, recipe: Recipe) -> Form:
    """What an image of this height and width becomes. Raises ValueError for one that the processor refuses."""
    if recipe.settings.tiling:
        blank = Picture(size, outline((*size, 3)), outline_resizer, recipe.settings.resample)
        tiles = cut(blank, recipe.settings.tiling)
        return Form(tiles.grid, tiles.pixels.shape, None if tiles.crops is None else tiles.crops.shape)
    return Form(*patch_shape(resized(*size, recipe, recipe.temporal), (1, 1), recipe))


def clip_form(size: Size, frames: int, recipe: Recipe) -> Form:
    """What so many frames of this height and width become. Raises as `image_form`."""
    if recipe.settings.tiling:
        one = image_form(size, recipe).pixels
        return Form((frames, 1, 1), (frames * one[0], *one[1:]))
    slots = (-(-frames // recipe.temporal), recipe.temporal)
    return Form(*patch_shape(resized(*size, recipe, frames), slots, recipe))
