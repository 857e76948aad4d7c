"""Target sizes of images before they are cut into patches, by the rules of several model families."""

import math
from collections.abc import Callable

from vitwire_server.core.models import Resizing
from vitwire_server.preparing.rules.patches import Size, smart_resize
from vitwire_server.preparing.rules.recipe import Recipe

_FINENESS = 1e-5
_LARGEST_SCALE = 100.0


def resized(height: int, width: int, recipe: Recipe, frames: int = 1) -> Size:
    """Height and width to resize to. Raises ValueError for sizes that the model's processor rejects too."""
    if min(height, width) < 1:
        raise ValueError(f"expected at least one pixel, got a frame of {height}x{width}")
    if recipe.settings.resizing is Resizing.AREA:
        return smart_resize(height, width, recipe, frames)
    return _RULES[recipe.settings.resizing](height, width, recipe)


def _longest_side(height: int, width: int, recipe: Recipe) -> Size:
    """The longer side is at most the square root of the area bound; both are rounded up to whole tokens."""
    shrink = max(height, width) / math.isqrt(recipe.settings.max_pixels)
    if shrink > 1:
        height, width = math.floor(height / shrink), math.floor(width / shrink)
    factor = recipe.factor
    return max(1, -(-height // factor)) * factor, max(1, -(-width // factor)) * factor


def _most_patches(height: int, width: int, recipe: Recipe) -> Size:
    """The largest scale, by bisection, at which the number of patches, rounded up, is within the bound."""
    patch, most = recipe.factor, recipe.settings.max_pixels // recipe.factor**2

    def patches(scale: float) -> Size:
        return max(1, math.ceil(height * scale / patch)), max(1, math.ceil(width * scale / patch))

    low, high = _FINENESS / 10, _LARGEST_SCALE
    while high - low >= _FINENESS:
        middle = (low + high) / 2
        low, high = (middle, high) if math.prod(patches(middle)) <= most else (low, middle)
    rows, columns = patches(low)
    return rows * patch, columns * patch


def _most_tokens(height: int, width: int, recipe: Recipe) -> Size:
    """Scaled to the area bound, both sides rounded down to whole tokens."""
    factor = recipe.factor
    scale = math.sqrt(recipe.settings.max_pixels / (height * width))
    rows, columns = math.floor(height * scale / factor), math.floor(width * scale / factor)
    most = recipe.settings.max_pixels // factor**2
    if not rows and not columns:
        raise ValueError(f"an image of {height}x{width} is less than one token")
    if not rows:
        rows, columns = 1, min(width // height, most)
    elif not columns:
        rows, columns = min(height // width, most), 1
    return rows * factor, columns * factor


def _enlarged_area(height: int, width: int, recipe: Recipe) -> Size:
    """By area, after enlarging a side shorter than a token to one token."""
    side = recipe.factor
    if height < side:
        height, width = side, round(width * side / height)
    if width < side:
        height, width = round(height * side / width), side
    return smart_resize(height, width, recipe)


_RULES: dict[Resizing, Callable[[int, int, Recipe], Size]] = {
    Resizing.ENLARGED_AREA: _enlarged_area,
    Resizing.LONGEST_SIDE: _longest_side,
    Resizing.MOST_PATCHES: _most_patches,
    Resizing.MOST_TOKENS: _most_tokens,
}
