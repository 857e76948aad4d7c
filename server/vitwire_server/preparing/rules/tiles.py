"""Images to tiles of one size: the layout, and the content of each tile.

Each rule follows a model family's Hugging Face processor.
"""

import itertools
import math
from collections.abc import Callable, Sequence

from vitwire_server.core.decoding import MAX_PICTURE_PIXELS
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.preparing.rules.layouts import (
    at_longest,
    covering_layout,
    layout_around,
    layout_of_most,
    layout_of_ratio,
    layout_of_scale,
    layout_of_windows,
    layouts_of,
    parts,
)
from vitwire_server.preparing.rules.patches import Size
from vitwire_server.preparing.rules.sketches import Drawing, Sketch

_ENOUGH_PIXELS = 0.6
"""Share of the image's pixels that is enough for a layout."""
_FINER = 3
"""Fewest tiles of the finer of two layouts."""
_ELONGATED, _VERY_ELONGATED = 1.5, 4
_NARROW = 32
_ROUNDED_UP = 0.2
"""Minimum remainder, as a share of a window, that gets a window."""


def cut(picture: Sketch, tiling: Tiling) -> Drawing:
    """The tiles of an image. Raises ValueError for an image that the model's processor refuses."""
    return _RULES[tiling.rule](picture, tiling)


def _whole(layout: Size, tile: Size) -> Size:
    """The size of all tiles of a layout together."""
    return layout[0] * tile[0], layout[1] * tile[1]


# -- one tile ----------------------------------------------------------------------------------------


def _one(tile: Sketch) -> Drawing:
    return Drawing((1, 1, 1), (tile,))


def _stretch(picture: Sketch, tiling: Tiling) -> Drawing:
    return _one(picture.at(tiling.tile))


def _square(picture: Sketch, tiling: Tiling) -> Drawing:
    """One tile. If there are crops, the crop is made from the image, and the tile from the crop."""
    if tiling.crop is None:
        return _one(picture.squared(tiling.tile[0], tiling.background, tiling.min_side))
    high = picture.squared(tiling.crop[0], tiling.crop_background, tiling.min_side, tiling.crop_resample)
    low = high.squared(tiling.tile[0], tiling.background, tiling.min_side)
    return Drawing((1, 1, 1), (low,), (high,))


def _center_crop(picture: Sketch, tiling: Tiling) -> Drawing:
    """One tile, the middle of the image. Raises ValueError if the image is too elongated to be resized."""
    height, width = picture.size
    short = min(height, width)
    size = (tiling.min_side * height // short, tiling.min_side * width // short)
    if math.prod(size) > MAX_PICTURE_PIXELS:
        raise ValueError(f"{height}x{width} is too elongated: resized, it would have {math.prod(size)} pixels")
    return _one(picture.at(size).middle(tiling.tile))


def _stretched_crop(picture: Sketch, tiling: Tiling) -> Drawing:
    return _one(picture.at((tiling.min_side, tiling.min_side)).middle(tiling.tile))


def _corner(picture: Sketch, tiling: Tiling) -> Drawing:
    side, (height, width) = tiling.tile[0], picture.size
    shorter = max(int(min(height, width) * (side / max(height, width))), tiling.min_side, 1)
    height, width = (shorter, side) if width >= height else (side, shorter)
    tile = picture.at((height, width)).placed(tiling.tile, (0, 0), tiling.background)
    return Drawing((1, math.ceil(height / tiling.patch), math.ceil(width / tiling.patch)), (tile,))


# -- layouts of tiles --------------------------------------------------------------------------------


def _closest_ratio(picture: Sketch, tiling: Tiling) -> Drawing:
    """If there are crops, large images are cut into them, and one tile shows the whole image."""
    size = tiling.crop or tiling.tile
    view = picture.squared(tiling.tile[0], tiling.background)
    if tiling.crop and max(picture.size) <= size[0]:
        return _one(view)
    layouts = tiling.layouts or layouts_of(tiling.min_tiles, tiling.max_tiles)
    layout = layout_of_ratio(picture.size, size, layouts)
    tiles = picture.at(_whole(layout, size)).split(size)
    if tiling.crop:
        return Drawing((1 + len(tiles), *layout), (view,), tiles)
    return _with_overview(picture, tiles, layout, tiling)


def _two_ratios(picture: Sketch, tiling: Tiling) -> Drawing:
    """The tiles of a finer layout, those of the nearest one, and the whole image; a layout of one tile adds none."""
    tile = tiling.tile
    first = layout_of_ratio(picture.size, tile, layouts_of(tiling.min_tiles, tiling.max_tiles))
    finer = [
        (rows, columns)
        for rows, columns in layouts_of(_FINER, tiling.max_tiles)
        if first[0] % rows and first[1] % columns
    ]
    tiles = [
        part
        for layout in (layout_of_ratio(picture.size, tile, finer), first)
        if math.prod(layout) > 1
        for part in picture.at(_whole(layout, tile)).split(tile)
    ]
    return Drawing((1 + len(tiles), 1, 1), (*tiles, picture.at(tile)))


def _ratio_and_area(picture: Sketch, tiling: Tiling) -> Drawing:
    """The layout nearest in shape among those of enough pixels: fewer count as a worse shape."""
    height, width = picture.size
    ratio, area = width / height, height * width

    def fitness(layout: Size) -> float:
        rows, columns = layout
        shape, enlarged = columns / rows, columns * rows * tiling.tile[0] * tiling.tile[1] / area
        return min(enlarged, _ENOUGH_PIXELS) * min(shape / ratio, ratio / shape)

    return _stretched_to(max(layouts_of(tiling.min_tiles, tiling.max_tiles), key=fitness), picture, tiling)


def _best_fit(picture: Sketch, tiling: Tiling) -> Drawing:
    height, width = picture.size
    layout = layout_of_most(picture.size, tiling.tile, tiling.layouts)
    whole = _whole(layout, tiling.tile)
    scale_down, scale_across = whole[0] / height, whole[1] / width
    if scale_across < scale_down:
        size = (min(math.ceil(height * scale_across), whole[0]), whole[1])
    else:
        size = (whole[0], min(math.ceil(width * scale_down), whole[1]))
    tiles = picture.at(size).centred(whole, tiling.background).split(tiling.tile)
    return _with_overview(picture, tiles, layout, tiling, always=True)


def _padded_fit(picture: Sketch, tiling: Tiling) -> Drawing:
    """One layout at least; the overview is always there, and padded too."""
    layout = layout_of_most(picture.size, tiling.tile, tiling.layouts)
    tiles = picture.padded(_whole(layout, tiling.tile), tiling.background).split(tiling.tile)
    return Drawing((1 + len(tiles), *layout), (picture.padded(tiling.tile, tiling.background), *tiles))


def _canvas(picture: Sketch, tiling: Tiling) -> Drawing:
    """Enlarges an image to at most one tile, and shrinks it only to fit the largest layout."""
    layout = layout_of_scale(picture.size, tiling.tile[0], tiling.max_tiles)
    whole = _whole(layout, tiling.tile)
    room = tuple(min(max(length, tiling.tile[0]), most) for length, most in zip(picture.size, whole, strict=True))
    (height, width), (down, across) = picture.size, room
    if across / width < down / height:
        size = (min(math.floor(height * (across / width)), down), across)
    else:
        size = (down, min(math.floor(width * (down / height)), across))
    resized = picture.at((max(size[0], 1), max(size[1], 1)))
    return _with_overview(picture, resized.placed(whole, (0, 0), tiling.background).split(tiling.tile), layout, tiling)


def _least_scaling(picture: Sketch, tiling: Tiling) -> Drawing:
    """Enlarges an image to whole tiles, and shrinks it only to fit the largest layout."""
    return _stretched_to(layout_of_scale(picture.size, tiling.tile[0], tiling.max_tiles), picture, tiling)


def _whole_tiles(picture: Sketch, tiling: Tiling) -> Drawing:
    """Each step resizes the result of the one before. With at most one tile, the image is stretched to it."""
    first = picture.at(at_longest(picture.size, tiling.max_side))
    if tiling.max_tiles == 1:
        return _stretch(first, tiling)
    layout = layout_around(first.size, tiling.tile[0])
    return _stretched_to(layout, first.at(_whole(layout, tiling.tile)), tiling)


def _covering(picture: Sketch, tiling: Tiling) -> Drawing:
    return _stretched_to(covering_layout(picture.size, tiling.tile[0], tiling.max_tiles), picture, tiling)


def _covering_parts(picture: Sketch, tiling: Tiling) -> Drawing:
    columns, rows = covering_layout(picture.size, tiling.tile[0], tiling.max_tiles)  # not the other way round here
    down, across = (parts(length, count) for length, count in zip(picture.size, (rows, columns), strict=True))
    pieces = [
        picture.part((bottom - height, right - width), (height, width))
        for bottom, height in zip(itertools.accumulate(down), down, strict=True)
        for right, width in zip(itertools.accumulate(across), across, strict=True)
    ]
    shown = pieces if len(pieces) == 1 else [picture, *pieces]
    return Drawing((len(shown), rows, columns), [_fitted(part, tiling) for part in shown])


def _fitted(picture: Sketch, tiling: Tiling) -> Sketch:
    """The picture resized to a longer side of a tile's, the other rounded down, centred in a tile."""
    side, (height, width) = tiling.tile[0], picture.size
    size = (side, int(width / height * side)) if height > width else (int(height / width * side), side)
    return picture.at((max(size[0], 1), max(size[1], 1))).centred(tiling.tile, tiling.background)


def _stretched_to(layout: Size, picture: Sketch, tiling: Tiling) -> Drawing:
    tiles = picture.at(_whole(layout, tiling.tile)).split(tiling.tile)
    return _with_overview(picture, tiles, layout, tiling)


def _with_overview(
    picture: Sketch, tiles: Sequence[Sketch], layout: Size, tiling: Tiling, *, always: bool = False
) -> Drawing:
    if tiling.overview is not Overview.NONE and (always or len(tiles) > 1):
        whole = picture.at(tiling.tile)
        tiles = [whole, *tiles] if tiling.overview is Overview.FIRST else [*tiles, whole]
    return Drawing((len(tiles), *layout), tiles)


# -- windows over an image that is too large or too long for its overview alone, as Step3-VL cuts them -------


def _windows(picture: Sketch, tiling: Tiling) -> Drawing:
    assert tiling.crop is not None, "windows become crops"
    if min(picture.size) < _NARROW and max(picture.size) > _VERY_ELONGATED * min(picture.size):
        side = max(picture.size)
        if side * side > MAX_PICTURE_PIXELS:
            raise _too_elongated(picture.size)
        picture = picture.placed((side, side), (0, 0), ())
    bounded = _bounded(picture.size, tiling.max_side)
    view = picture.at(bounded).at(tiling.tile)
    window = _window(bounded, tiling.tile[0], tiling.crop[0])
    if not window:
        return _one(view)
    size = (_snapped(bounded[0], window), _snapped(bounded[1], window))
    crops = [part.at(tiling.crop) for part in picture.at(size).split((window, window))]
    rows, columns = (max(1, length // window) for length in size)
    return Drawing((1 + rows * columns, rows, columns), (view,), crops)


def _bounded(size: Size, longest: int) -> Size:
    if not longest or max(size) <= longest:
        return size
    scale = longest / max(size)
    height, width = int(size[0] * scale), int(size[1] * scale)
    if not height or not width:
        raise _too_elongated(size)
    return height, width


def _too_elongated(size: Size) -> ValueError:
    return ValueError(f"{size[0]}x{size[1]} is too elongated for this model")


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


def _overlapping(picture: Sketch, tiling: Tiling) -> Drawing:
    """As Moondream cuts images."""
    shared = 2 * tiling.margin
    window = tiling.tile[0] - shared
    rows, columns = layout_of_windows((picture.size[0] - shared, picture.size[1] - shared), window, tiling.max_tiles)
    whole = picture.at((rows * window + shared, columns * window + shared))
    corners = [(row * window, column * window) for row in range(rows) for column in range(columns)]
    tiles = [whole.part(corner, tiling.tile) for corner in corners]
    return Drawing((1 + len(tiles), rows, columns), (picture.at(tiling.tile), *tiles))


_RULES: dict[TilingRule, Callable[[Sketch, Tiling], Drawing]] = {
    TilingRule.STRETCH: _stretch,
    TilingRule.SQUARE: _square,
    TilingRule.CENTER_CROP: _center_crop,
    TilingRule.STRETCHED_CROP: _stretched_crop,
    TilingRule.CLOSEST_RATIO: _closest_ratio,
    TilingRule.TWO_RATIOS: _two_ratios,
    TilingRule.RATIO_AND_AREA: _ratio_and_area,
    TilingRule.BEST_FIT: _best_fit,
    TilingRule.PADDED_FIT: _padded_fit,
    TilingRule.CANVAS: _canvas,
    TilingRule.WHOLE_TILES: _whole_tiles,
    TilingRule.LEAST_SCALING: _least_scaling,
    TilingRule.CORNER: _corner,
    TilingRule.COVERING: _covering,
    TilingRule.COVERING_PARTS: _covering_parts,
    TilingRule.WINDOWS: _windows,
    TilingRule.OVERLAPPING: _overlapping,
}
