"""Images to tiles of one size: the layout, and the content of each tile.

Each rule is that of a model family's Hugging Face processor; pixels stay uint8.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from vitwire._coverings import covering_layout, parts
from vitwire._patches import CHANNELS, MAX_DECODED_PIXELS, Grid, Pixels, Size

Resizer = Callable[[Pixels, Size, int], Pixels]
"""Resizes a picture to a size, with a resampling filter."""

_ELONGATED, _VERY_ELONGATED = 1.5, 4
_NARROW = 32
_ENOUGH_PIXELS = 0.6
"""Of a layout, as a share of the image's."""
_FINER = 3
"""Fewest tiles of the finer of two layouts."""
_ROUNDED_UP = 0.2
"""Minimum remainder, as a share of a window, that gets its own window."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a model's processor cuts images into tiles."""

    rule: str
    """A key of `_RULES`."""
    tile: Size
    """Height and width of a tile."""
    overview: str = "none"
    """Position of the tile that shows the whole image, if it was cut: none, first or last."""
    min_tiles: int = 1
    max_tiles: int = 1
    layouts: tuple[tuple[int, int], ...] = ()
    """Allowed rows and columns, for best_fit, padded_fit and, if there are any, closest_ratio."""
    background: tuple[int, ...] = ()
    min_side: int = 0
    max_side: int = 0
    crop: Size | None = None
    """Height and width of a crop."""
    crop_background: tuple[int, ...] = ()
    crop_resample: int | None = None
    patch: int = 0
    """Side of a patch, where grids count those of an image without background."""

    def __post_init__(self) -> None:
        if self.rule not in _RULES:
            raise ValueError(f"tiling {self.rule!r} is not supported by this version of the client")
        if min(*self.tile, *(self.crop or (1, 1))) < 1 or not 1 <= self.min_tiles <= self.max_tiles:
            raise ValueError(f"invalid tiling: {self.min_tiles} to {self.max_tiles} tiles of {self.tile}")


@dataclass(frozen=True, slots=True)
class Picture:
    """An image, and how to resize it."""

    size: Size
    pixels: Pixels
    resizer: Resizer
    resample: int

    def at(self, size: Size, resample: int | None = None) -> Pixels:
        """The picture at a size, (H, W, 3)."""
        return self.resizer(self.pixels, size, self.resample if resample is None else resample)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Pixels `(tiles, 3, H, W)` of one image, its grid, and its crops, if any."""

    pixels: Pixels
    grid: Grid
    crops: Pixels | None = None


class Outline(np.ndarray[tuple[int, ...], np.dtype[np.uint8]]):
    """Stands for pixels of which only the shape matters; takes no memory."""


def outline(shape: tuple[int, ...]) -> Outline:
    """Pixels of this shape."""
    return np.broadcast_to(np.zeros((), np.uint8).view(Outline), shape, subok=True)  # type: ignore[return-value]


def outline_resizer(pixels: Pixels, size: Size, resample: int) -> Pixels:
    """Resizes outlines."""
    del pixels, resample
    return outline((*size, CHANNELS))


def cut(picture: Picture, tiling: Tiling) -> Tiles:
    """The tiles of an image."""
    return _RULES[tiling.rule](picture, tiling)


# -- one tile ----------------------------------------------------------------------------------------


def _stretch(picture: Picture, tiling: Tiling) -> Tiles:
    return Tiles(_stacked([picture.at(tiling.tile)]), (1, 1, 1))


def _square(picture: Picture, tiling: Tiling) -> Tiles:
    """One tile. Where there are crops, the crop is made from the image, and the tile from the crop."""
    if tiling.crop is None:
        return Tiles(_stacked([_squared(picture, tiling.tile[0], tiling.background, tiling.min_side)]), (1, 1, 1))
    high = _squared(picture, tiling.crop[0], tiling.crop_background, tiling.min_side, tiling.crop_resample)
    large = Picture(tiling.crop, high, picture.resizer, picture.resample)
    low = _squared(large, tiling.tile[0], tiling.background, tiling.min_side)
    return Tiles(_stacked([low]), (1, 1, 1), _stacked([high]))


def _center_crop(picture: Picture, tiling: Tiling) -> Tiles:
    """One tile, the middle of the image. Raises ValueError if the image is too elongated to be resized."""
    height, width = picture.size
    short = min(height, width)
    size = (tiling.min_side * height // short, tiling.min_side * width // short)
    if math.prod(size) > MAX_DECODED_PIXELS:
        raise ValueError(f"{height}x{width} is too elongated: resized, it would have {math.prod(size)} pixels")
    top, left = ((whole - own) // 2 for whole, own in zip(size, tiling.tile, strict=True))
    middle = picture.at(size)[top : top + tiling.tile[0], left : left + tiling.tile[1]]
    return Tiles(_stacked([middle]), (1, 1, 1))


def _corner(picture: Picture, tiling: Tiling) -> Tiles:
    side, (height, width) = tiling.tile[0], picture.size
    shorter = max(int(min(height, width) * (side / max(height, width))), tiling.min_side, 1)
    height, width = (shorter, side) if width >= height else (side, shorter)
    tile = _placed(picture.at((height, width)), tiling.tile, (0, 0), tiling.background)
    return Tiles(_stacked([tile]), (1, math.ceil(height / tiling.patch), math.ceil(width / tiling.patch)))


def _squared(
    picture: Picture, side: int, background: tuple[int, ...], min_side: int = 0, resample: int | None = None
) -> Pixels:
    """The picture resized to a longer side of `side`, centred in a square."""
    scale = side / max(picture.size)
    height, width = (max(round(length * scale), min_side, 1) for length in picture.size)
    return _centred(picture.at((height, width), resample), (side, side), background)


def _centred(pixels: Pixels, size: Size, background: tuple[int, ...]) -> Pixels:
    top, left = ((whole - own) // 2 for whole, own in zip(size, pixels.shape, strict=False))
    return _placed(pixels, size, (top, left), background)


def _placed(pixels: Pixels, size: Size, corner: Size, background: tuple[int, ...]) -> Pixels:
    if pixels.shape[:2] == size:
        return pixels
    if isinstance(pixels, Outline):
        return outline((*size, CHANNELS))
    canvas: npt.NDArray[np.uint8] = np.empty((*size, CHANNELS), np.uint8)
    canvas[:] = background or 0
    top, left = corner
    canvas[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
    return canvas


# -- layouts of tiles --------------------------------------------------------------------------------


def _closest_ratio(picture: Picture, tiling: Tiling) -> Tiles:
    """Where there are crops, large images are cut into them, and one tile shows the whole image."""
    size = tiling.crop or tiling.tile
    if tiling.crop and max(picture.size) <= size[0]:
        return Tiles(_stacked([_squared(picture, tiling.tile[0], tiling.background)]), (1, 1, 1))
    rows, columns = _layout_of_ratio(picture.size, size, tiling.layouts or _layouts(tiling.min_tiles, tiling.max_tiles))
    tiles = _split(picture.at((rows * size[0], columns * size[1])), size)
    if tiling.crop:
        view = _stacked([_squared(picture, tiling.tile[0], tiling.background)])
        return Tiles(view, (1 + len(tiles), rows, columns), _stacked(tiles))
    return _with_overview(picture, tiles, (rows, columns), tiling)


def _two_ratios(picture: Picture, tiling: Tiling) -> Tiles:
    """The tiles of a finer layout, those of the nearest one, and the whole image; a layout of one tile adds none."""
    tile = tiling.tile
    first = _layout_of_ratio(picture.size, tile, _layouts(tiling.min_tiles, tiling.max_tiles))
    finer = [
        (rows, columns)
        for rows, columns in _layouts(_FINER, tiling.max_tiles)
        if first[0] % rows and first[1] % columns
    ]
    tiles = [
        part
        for rows, columns in (_layout_of_ratio(picture.size, tile, finer), first)
        if rows * columns > 1
        for part in _split(picture.at((rows * tile[0], columns * tile[1])), tile)
    ]
    return Tiles(_stacked([*tiles, picture.at(tile)]), (1 + len(tiles), 1, 1))


def _ratio_and_area(picture: Picture, tiling: Tiling) -> Tiles:
    """The layout nearest in shape among those of enough pixels: fewer count as a worse shape."""
    height, width = picture.size
    ratio, area = width / height, height * width

    def fitness(layout: Size) -> float:
        rows, columns = layout
        own, enlarged = columns / rows, columns * rows * tiling.tile[0] * tiling.tile[1] / area
        return min(enlarged, _ENOUGH_PIXELS) * min(own / ratio, ratio / own)

    rows, columns = max(_layouts(tiling.min_tiles, tiling.max_tiles), key=fitness)
    tiles = _split(picture.at((rows * tiling.tile[0], columns * tiling.tile[1])), tiling.tile)
    return _with_overview(picture, tiles, (rows, columns), tiling)


def _layout_of_ratio(picture: Size, tile: Size, layouts: Iterable[Size]) -> Size:
    """Rows and columns of the layout nearest in aspect ratio; in a tie, the larger if the image fills half of it.

    `layouts` are rows and columns; if there is none, the image is one tile.
    """
    ratio, area = picture[1] / picture[0], picture[0] * picture[1]
    best, distance = (1, 1), math.inf
    for rows, columns in layouts:
        off = abs(ratio - columns / rows)
        if off < distance or (off == distance and 2 * area > tile[0] * tile[1] * rows * columns):
            best, distance = (rows, columns), off
    return best


@cache
def _layouts(fewest: int, most: int) -> tuple[Size, ...]:
    """Rows and columns of all layouts with `fewest` to `most` tiles, by number of tiles."""
    pairs = [(rows, columns) for columns in range(1, most + 1) for rows in range(1, most + 1)]
    return tuple(sorted((p for p in pairs if fewest <= p[0] * p[1] <= most), key=lambda pair: pair[0] * pair[1]))


def _best_fit(picture: Picture, tiling: Tiling) -> Tiles:
    height, width = picture.size
    rows, columns = _layout_of_most(picture.size, tiling)
    whole = (rows * tiling.tile[0], columns * tiling.tile[1])
    scale_down, scale_across = whole[0] / height, whole[1] / width
    if scale_across < scale_down:
        size = (min(math.ceil(height * scale_across), whole[0]), whole[1])
    else:
        size = (whole[0], min(math.ceil(width * scale_down), whole[1]))
    tiles = _split(_centred(picture.at(size), whole, tiling.background), tiling.tile)
    return _with_overview(picture, tiles, (rows, columns), tiling, always=True)


def _padded_fit(picture: Picture, tiling: Tiling) -> Tiles:
    """One layout at least; the overview is always there, and padded too."""
    rows, columns = _layout_of_most(picture.size, tiling)
    whole = (rows * tiling.tile[0], columns * tiling.tile[1])
    tiles = _split(_padded(picture, whole, tiling.background), tiling.tile)
    overview = _padded(picture, tiling.tile, tiling.background)
    return Tiles(_stacked([overview, *tiles]), (1 + len(tiles), rows, columns))


def _padded(picture: Picture, size: Size, background: tuple[int, ...]) -> Pixels:
    """The picture enlarged or shrunk to a size in its own shape, centred; as `PIL.ImageOps.pad` rounds."""
    (height, width), (down, across) = picture.size, size
    if width / height > across / down:
        down = round(height / width * across)
    elif width / height < across / down:
        across = round(width / height * down)
    if not down or not across:
        raise ValueError(f"{height}x{width} is too elongated for this model")
    corner = (round((size[0] - down) * 0.5), round((size[1] - across) * 0.5))
    return _placed(picture.at((down, across)), size, corner, background)


def _layout_of_most(picture: Size, tiling: Tiling) -> Size:
    """The layout that keeps most pixels of the image; in a tie, the smallest."""
    height, width = picture

    def kept(layout: Size) -> tuple[int, int]:
        down, across = layout[0] * tiling.tile[0], layout[1] * tiling.tile[1]
        scale = min(across / width, down / height)
        effective = min(int(width * scale) * int(height * scale), width * height)
        return effective, effective - down * across

    return max(tiling.layouts, key=kept)


def _canvas(picture: Picture, tiling: Tiling) -> Tiles:
    """Enlarges an image to at most one tile, and shrinks it only to fit the largest layout."""
    rows, columns = _layout_of_scale(picture.size, tiling.tile[0], tiling.max_tiles)
    whole = (rows * tiling.tile[0], columns * tiling.tile[1])
    room = tuple(min(max(own, tiling.tile[0]), most) for own, most in zip(picture.size, whole, strict=True))
    (height, width), (down, across) = picture.size, room
    if across / width < down / height:
        size = (min(math.floor(height * (across / width)), down), across)
    else:
        size = (down, min(math.floor(width * (down / height)), across))
    resized = picture.at((max(size[0], 1), max(size[1], 1)))
    tiles = _split(_placed(resized, whole, (0, 0), tiling.background), tiling.tile)
    return _with_overview(picture, tiles, (rows, columns), tiling)


def _least_scaling(picture: Picture, tiling: Tiling) -> Tiles:
    """Enlarges an image to whole tiles, and shrinks it only to fit the largest layout."""
    rows, columns = _layout_of_scale(picture.size, tiling.tile[0], tiling.max_tiles)
    whole = picture.at((rows * tiling.tile[0], columns * tiling.tile[1]))
    return _with_overview(picture, _split(whole, tiling.tile), (rows, columns), tiling)


def _layout_of_scale(picture: Size, side: int, most: int) -> Size:
    """The layout that enlarges the image least, or else shrinks it least; in a tie, the smallest."""
    layouts = _layouts_by_ratio(most)
    sizes = np.array(layouts, np.float32) * side
    scales = (sizes / np.array(picture, np.float32)).min(axis=1)
    enlarging = scales[scales >= 1]
    chosen = enlarging.min() if len(enlarging) else scales.max()
    return min((layout for layout, scale in zip(layouts, scales, strict=True) if scale == chosen), key=math.prod)


@cache
def _layouts_by_ratio(most: int) -> tuple[Size, ...]:
    """Rows and columns of all layouts, grouped by shape, larger ones first."""
    by_ratio: dict[float, list[Size]] = {}
    for tiles in range(most, 0, -1):
        for rows in (n for n in range(1, tiles + 1) if tiles % n == 0):
            by_ratio.setdefault(rows / (tiles // rows), []).append((rows, tiles // rows))
    return tuple(layout for alike in by_ratio.values() for layout in alike)


def _whole_tiles(picture: Picture, tiling: Tiling) -> Tiles:
    """Each step resizes the result of the one before. With at most one tile, the image is stretched to it."""
    first = _resized(picture, _at_longest(picture.size, tiling.max_side))
    if tiling.max_tiles == 1:
        return _stretch(first, tiling)
    rows, columns = _layout_around(first.size, tiling.tile[0])
    whole = _resized(first, (rows * tiling.tile[0], columns * tiling.tile[1]))
    return _with_overview(whole, _split(whole.pixels, tiling.tile), (rows, columns), tiling)


def _resized(picture: Picture, size: Size) -> Picture:
    return Picture(size, picture.at(size), picture.resizer, picture.resample)


def _at_longest(size: Size, longest: int) -> Size:
    """The size with a longer side of `longest`, enlarged if need be; the shorter side is rounded up to an even number.

    A ratio of floats decides, as in the processor: `longest * height / width` rounds to other numbers.
    """
    ratio = size[1] / size[0]
    shorter = int(longest / ratio) if ratio >= 1 else int(longest * ratio)
    even = max(shorter + shorter % 2, 1)
    return (even, longest) if ratio >= 1 else (longest, even)


def _layout_around(size: Size, side: int) -> Size:
    """Rows and columns of the tiles that the picture is enlarged to."""
    ratio = size[1] / size[0]
    if ratio >= 1:
        columns = math.ceil(size[1] / side)
        return math.ceil(int(columns * side / ratio) / side), columns
    rows = math.ceil(size[0] / side)
    return rows, math.ceil(int(rows * side * ratio) / side)


def _covering(picture: Picture, tiling: Tiling) -> Tiles:
    rows, columns = covering_layout(picture.size, tiling.tile[0], tiling.max_tiles)
    tiles = _split(picture.at((rows * tiling.tile[0], columns * tiling.tile[1])), tiling.tile)
    return _with_overview(picture, tiles, (rows, columns), tiling)


def _covering_parts(picture: Picture, tiling: Tiling) -> Tiles:
    columns, rows = covering_layout(picture.size, tiling.tile[0], tiling.max_tiles)  # not the other way round here
    down, across = (parts(length, count) for length, count in zip(picture.size, (rows, columns), strict=True))
    pieces = [
        part[:, at - width : at]
        for part in np.split(picture.pixels, np.cumsum(down)[:-1])
        for at, width in zip(np.cumsum(across), across, strict=True)
    ]
    shown = pieces if len(pieces) == 1 else [picture.pixels, *pieces]
    tiles = [
        _fitted(Picture((part.shape[0], part.shape[1]), part, picture.resizer, picture.resample), tiling)
        for part in shown
    ]
    return Tiles(_stacked(tiles), (len(tiles), rows, columns))


def _fitted(picture: Picture, tiling: Tiling) -> Pixels:
    """The picture resized to a longer side of a tile's, the other rounded down, centred in a tile."""
    side, (height, width) = tiling.tile[0], picture.size
    size = (side, int(width / height * side)) if height > width else (int(height / width * side), side)
    return _centred(picture.at((max(size[0], 1), max(size[1], 1))), tiling.tile, tiling.background)


def _with_overview(
    picture: Picture, tiles: list[Pixels], layout: Size, tiling: Tiling, *, always: bool = False
) -> Tiles:
    if tiling.overview != "none" and (always or len(tiles) > 1):
        whole = picture.at(tiling.tile)
        tiles = [whole, *tiles] if tiling.overview == "first" else [*tiles, whole]
    return Tiles(_stacked(tiles), (len(tiles), *layout))


# -- windows -----------------------------------------------------------------------------------------


def _windows(picture: Picture, tiling: Tiling) -> Tiles:
    assert tiling.crop is not None, "windows become crops"
    if min(picture.size) < _NARROW and max(picture.size) > _VERY_ELONGATED * min(picture.size):
        side = max(picture.size)
        if side * side > MAX_DECODED_PIXELS:
            raise ValueError(f"{picture.size[0]}x{picture.size[1]} is too elongated for this model")
        square = _placed(picture.pixels, (side, side), (0, 0), ())
        picture = Picture((side, side), square, picture.resizer, picture.resample)
    bounded = _bounded(picture.size, tiling.max_side)
    first = Picture(bounded, picture.at(bounded), picture.resizer, picture.resample)
    view = _stacked([first.at(tiling.tile)])
    window = _window(bounded, tiling.tile[0], tiling.crop[0])
    if not window:
        return Tiles(view, (1, 1, 1))
    height, width = (_snapped(length, window) for length in bounded)
    rows, columns = max(1, height // window), max(1, width // window)
    whole = picture.at((height, width))
    parts = [whole[y : y + window, x : x + window] for y in range(0, height, window) for x in range(0, width, window)]
    crops = _stacked([picture.resizer(part, tiling.crop, picture.resample) for part in parts])
    return Tiles(view, (1 + rows * columns, rows, columns), crops)


def _bounded(size: Size, longest: int) -> Size:
    if not longest or max(size) <= longest:
        return size
    scale = longest / max(size)
    return int(size[0] * scale), int(size[1] * scale)


def _window(size: Size, view: int, crop: int) -> int:
    """The side of the windows; 0 if the whole view is enough."""
    short, long = sorted(size)
    if long <= view:
        return short if long / short > _ELONGATED else 0
    return min(short, crop) if long / short > _VERY_ELONGATED else crop


def _snapped(length: int, window: int) -> int:
    if length < window:
        return length
    whole, rest = divmod(length, window)
    return window * (whole + (rest > _ROUNDED_UP * window))


def _split(whole: Pixels, size: Size) -> list[Pixels]:
    """Tiles (H, W, 3) of a canvas, row by row."""
    height, width = size
    return [
        whole[y : y + height, x : x + width]
        for y in range(0, whole.shape[0], height)
        for x in range(0, whole.shape[1], width)
    ]


def _stacked(tiles: list[Pixels]) -> Pixels:
    """(tiles, 3, H, W) of tiles (H, W, 3)."""
    if isinstance(tiles[0], Outline):
        return outline((len(tiles), CHANNELS, *tiles[0].shape[:2]))
    return np.ascontiguousarray(np.stack(tiles).transpose(0, 3, 1, 2))


_RULES: dict[str, Callable[[Picture, Tiling], Tiles]] = {
    "stretch": _stretch,
    "square": _square,
    "center_crop": _center_crop,
    "closest_ratio": _closest_ratio,
    "two_ratios": _two_ratios,
    "ratio_and_area": _ratio_and_area,
    "best_fit": _best_fit,
    "padded_fit": _padded_fit,
    "canvas": _canvas,
    "whole_tiles": _whole_tiles,
    "least_scaling": _least_scaling,
    "corner": _corner,
    "covering": _covering,
    "covering_parts": _covering_parts,
    "windows": _windows,
}
