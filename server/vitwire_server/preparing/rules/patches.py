"""Frames to patches: target sizes of frames, and the order of their patches, as in the Hugging Face processors."""

import math
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from vitwire_server.core.models import Resizing
from vitwire_server.preparing.rules.recipe import Recipe

Pixels = npt.NDArray[np.uint8]
Grid = tuple[int, int, int]
Size = tuple[int, int]

CHANNELS = 3
MAX_ASPECT_RATIO = 200
_FINENESS = 1e-5
_LARGEST_SCALE = 100.0


def smart_resize(height: int, width: int, recipe: Recipe, frames: int = 1) -> Size:
    """Height and width to resize to: multiples of the factor, within the area bounds, nearly the same shape.

    `frames` (before repetition) matters only if the bounds span frames.
    Raises ValueError for empty or very long frames, and for too few if the bounds span frames.
    """
    if min(height, width) < 1:
        raise ValueError(f"expected at least one pixel, got a frame of {height}x{width}")
    factor, depth = recipe.factor, 1
    if recipe.settings.bounds_span_frames:
        if frames < recipe.temporal:
            raise ValueError(f"this model needs clips of at least {recipe.temporal} frames, got {frames}")
        depth = round(frames / recipe.temporal) * recipe.temporal  # ties to even, as in the processor
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
    else:
        frames = 1
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise ValueError(f"{height}x{width} is too elongated: the maximum aspect ratio is {MAX_ASPECT_RATIO}")

    rows, columns = round(height / factor), round(width / factor)
    area = depth * rows * factor * columns * factor
    if area > recipe.settings.max_pixels:
        shrink = math.sqrt(frames * height * width / recipe.settings.max_pixels)
        rows = max(1, math.floor(height / shrink / factor))
        columns = max(1, math.floor(width / shrink / factor))
    elif area < recipe.settings.min_pixels:
        grow = math.sqrt(recipe.settings.min_pixels / (frames * height * width))
        rows, columns = math.ceil(height * grow / factor), math.ceil(width * grow / factor)
    return rows * factor, columns * factor


def resized(height: int, width: int, recipe: Recipe, frames: int = 1) -> Size:
    """Height and width to resize to. Raises ValueError for sizes that the model's processor rejects too."""
    if recipe.size:
        return recipe.size
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
    """The largest scale, by bisection, at which the number of patches, rounded up, is at most its own in the bounds."""
    patch = recipe.factor
    least, most = (area // patch**2 for area in (recipe.settings.min_pixels, recipe.settings.max_pixels))
    most = min(max((height // patch) * (width // patch), least), most)

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


def patch_rows(frames: Iterable[Pixels], size: Size, slots: Size, recipe: Recipe) -> tuple[Pixels, Grid]:
    """Rows of patches, and their grid, of RGB frames (H, W, 3) of `size`.

    `slots` is (t, T): t groups of T frames each; the last frame is repeated to fill them.
    Rows are in the order (t, h/m, w/m, m, m), so that the patches of one token are adjacent, or (t, h, w)
    for raster patches; their columns in the order (C, T, p, p) or (T, p, p, C).
    """
    patch, merge = recipe.patch, 1 if recipe.raster else recipe.merge
    (height, width), (groups, depth) = size, slots
    high, wide = height // (patch * merge), width // (patch * merge)
    columns = (depth, patch, patch, CHANNELS) if recipe.channels_last else (CHANNELS, depth, patch, patch)
    rows = np.empty((groups, high, wide, merge, merge, *columns), np.uint8)
    # (t, T, h/m, m, p, w/m, m, p, C): frames, as a view
    order = (0, 5, 1, 3, 6, 2, 4, 7, 8) if recipe.channels_last else (0, 6, 1, 3, 7, 2, 4, 8, 5)
    canvas = rows.transpose(order)
    filled = 0
    for frame in frames:
        canvas[divmod(filled, depth)] = frame.reshape(canvas.shape[2:])
        filled += 1
    last = canvas[divmod(filled - 1, depth)]
    for spare in range(filled, groups * depth):
        canvas[divmod(spare, depth)] = last
    grid, shape = patch_shape(size, slots, recipe)
    return rows.reshape(shape), grid


def patch_shape(size: Size, slots: Size, recipe: Recipe) -> tuple[Grid, tuple[int, int]]:
    """The grid of frames of `size`, and the shape of its rows; `slots` as in `patch_rows`."""
    patch, (groups, depth) = recipe.patch, slots
    grid = (groups, size[0] // patch, size[1] // patch)
    return grid, (math.prod(grid), CHANNELS * depth * patch * patch)
