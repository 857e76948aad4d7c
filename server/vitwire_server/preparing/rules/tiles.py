"""Images to tiles of one size: the layout, and the content of each tile.

Each rule is that of a model family's Hugging Face processor; pixels stay uint8.
"""

import itertools
import math
from collections.abc import Callable

from vitwire_server.core.decoding import MAX_PICTURE_PIXELS
from vitwire_server.core.tilings import Overview, Tiling, TilingRule
from vitwire_server.preparing.rules.layouts import (
    at_longest,
    covering_layout,
    layout_around,
    layout_of_most,
    layout_of_ratio,
    layout_of_scale,
    layouts_of,
    parts,
)
from vitwire_server.preparing.rules.patches import Pixels, Size
from vitwire_server.preparing.rules.pictures import (
    Picture,
    Tiles,
    centred,
    padded,
    placed,
    resized,
    split,
    squared,
    stacked,
)
from vitwire_server.preparing.rules.windows import windows

_ENOUGH_PIXELS = 0.6
"""Of a layout, as a share of the image's."""
_FINER = 3
"""Fewest tiles of the finer of two layouts."""


def cut(picture: Picture, tiling: Tiling) -> Tiles:
    """The tiles of an image."""
    return _RULES[tiling.rule](picture, tiling)


# -- one tile ----------------------------------------------------------------------------------------


def _stretch(picture: Picture, tiling: Tiling) -> Tiles:
    return Tiles(stacked([picture.at(tiling.tile)]), (1, 1, 1))


def _square(picture: Picture, tiling: Tiling) -> Tiles:
    """One tile. Where there are crops, the crop is made from the image, and the tile from the crop."""
    if tiling.crop is None:
        return Tiles(stacked([squared(picture, tiling.tile[0], tiling.background, tiling.min_side)]), (1, 1, 1))
    high = squared(picture, tiling.crop[0], tiling.crop_background, tiling.min_side, tiling.crop_resample)
    large = Picture(tiling.crop, high, picture.resizer, picture.resample)
    low = squared(large, tiling.tile[0], tiling.background, tiling.min_side)
    return Tiles(stacked([low]), (1, 1, 1), stacked([high]))


def _center_crop(picture: Picture, tiling: Tiling) -> Tiles:
    """One tile, the middle of the image. Raises ValueError if the image is too elongated to be resized."""
    height, width = picture.size
    short = min(height, width)
    size = (tiling.min_side * height // short, tiling.min_side * width // short)
    if math.prod(size) > MAX_PICTURE_PIXELS:
        raise ValueError(f"{height}x{width} is too elongated: resized, it would have {math.prod(size)} pixels")
    return _middle(picture, size, tiling.tile)


def _stretched_crop(picture: Picture, tiling: Tiling) -> Tiles:
    return _middle(picture, (tiling.min_side, tiling.min_side), tiling.tile)


def _middle(picture: Picture, size: Size, tile: Size) -> Tiles:
    """One tile of the picture at this size."""
    top, left = ((whole - own) // 2 for whole, own in zip(size, tile, strict=True))
    return Tiles(stacked([picture.at(size)[top : top + tile[0], left : left + tile[1]]]), (1, 1, 1))


def _corner(picture: Picture, tiling: Tiling) -> Tiles:
    side, (height, width) = tiling.tile[0], picture.size
    shorter = max(int(min(height, width) * (side / max(height, width))), tiling.min_side, 1)
    height, width = (shorter, side) if width >= height else (side, shorter)
    tile = placed(picture.at((height, width)), tiling.tile, (0, 0), tiling.background)
    return Tiles(stacked([tile]), (1, math.ceil(height / tiling.patch), math.ceil(width / tiling.patch)))


# -- layouts of tiles --------------------------------------------------------------------------------


def _closest_ratio(picture: Picture, tiling: Tiling) -> Tiles:
    """Where there are crops, large images are cut into them, and one tile shows the whole image."""
    size = tiling.crop or tiling.tile
    if tiling.crop and max(picture.size) <= size[0]:
        return Tiles(stacked([squared(picture, tiling.tile[0], tiling.background)]), (1, 1, 1))
    rows, columns = layout_of_ratio(
        picture.size, size, tiling.layouts or layouts_of(tiling.min_tiles, tiling.max_tiles)
    )
    tiles = split(picture.at((rows * size[0], columns * size[1])), size)
    if tiling.crop:
        view = stacked([squared(picture, tiling.tile[0], tiling.background)])
        return Tiles(view, (1 + len(tiles), rows, columns), stacked(tiles))
    return _with_overview(picture, tiles, (rows, columns), tiling)


def _two_ratios(picture: Picture, tiling: Tiling) -> Tiles:
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
        for rows, columns in (layout_of_ratio(picture.size, tile, finer), first)
        if rows * columns > 1
        for part in split(picture.at((rows * tile[0], columns * tile[1])), tile)
    ]
    return Tiles(stacked([*tiles, picture.at(tile)]), (1 + len(tiles), 1, 1))


def _ratio_and_area(picture: Picture, tiling: Tiling) -> Tiles:
    """The layout nearest in shape among those of enough pixels: fewer count as a worse shape."""
    height, width = picture.size
    ratio, area = width / height, height * width

    def fitness(layout: Size) -> float:
        rows, columns = layout
        own, enlarged = columns / rows, columns * rows * tiling.tile[0] * tiling.tile[1] / area
        return min(enlarged, _ENOUGH_PIXELS) * min(own / ratio, ratio / own)

    rows, columns = max(layouts_of(tiling.min_tiles, tiling.max_tiles), key=fitness)
    tiles = split(picture.at((rows * tiling.tile[0], columns * tiling.tile[1])), tiling.tile)
    return _with_overview(picture, tiles, (rows, columns), tiling)


def _best_fit(picture: Picture, tiling: Tiling) -> Tiles:
    height, width = picture.size
    rows, columns = layout_of_most(picture.size, tiling.tile, tiling.layouts)
    whole = (rows * tiling.tile[0], columns * tiling.tile[1])
    scale_down, scale_across = whole[0] / height, whole[1] / width
    if scale_across < scale_down:
        size = (min(math.ceil(height * scale_across), whole[0]), whole[1])
    else:
        size = (whole[0], min(math.ceil(width * scale_down), whole[1]))
    tiles = split(centred(picture.at(size), whole, tiling.background), tiling.tile)
    return _with_overview(picture, tiles, (rows, columns), tiling, always=True)


def _padded_fit(picture: Picture, tiling: Tiling) -> Tiles:
    """One layout at least; the overview is always there, and padded too."""
    rows, columns = layout_of_most(picture.size, tiling.tile, tiling.layouts)
    whole = (rows * tiling.tile[0], columns * tiling.tile[1])
    tiles = split(padded(picture, whole, tiling.background), tiling.tile)
    overview = padded(picture, tiling.tile, tiling.background)
    return Tiles(stacked([overview, *tiles]), (1 + len(tiles), rows, columns))


def _canvas(picture: Picture, tiling: Tiling) -> Tiles:
    """Enlarges an image to at most one tile, and shrinks it only to fit the largest layout."""
    rows, columns = layout_of_scale(picture.size, tiling.tile[0], tiling.max_tiles)
    whole = (rows * tiling.tile[0], columns * tiling.tile[1])
    room = tuple(min(max(own, tiling.tile[0]), most) for own, most in zip(picture.size, whole, strict=True))
    (height, width), (down, across) = picture.size, room
    if across / width < down / height:
        size = (min(math.floor(height * (across / width)), down), across)
    else:
        size = (down, min(math.floor(width * (down / height)), across))
    resized = picture.at((max(size[0], 1), max(size[1], 1)))
    tiles = split(placed(resized, whole, (0, 0), tiling.background), tiling.tile)
    return _with_overview(picture, tiles, (rows, columns), tiling)


def _least_scaling(picture: Picture, tiling: Tiling) -> Tiles:
    """Enlarges an image to whole tiles, and shrinks it only to fit the largest layout."""
    rows, columns = layout_of_scale(picture.size, tiling.tile[0], tiling.max_tiles)
    whole = picture.at((rows * tiling.tile[0], columns * tiling.tile[1]))
    return _with_overview(picture, split(whole, tiling.tile), (rows, columns), tiling)


def _whole_tiles(picture: Picture, tiling: Tiling) -> Tiles:
    """Each step resizes the result of the one before. With at most one tile, the image is stretched to it."""
    first = resized(picture, at_longest(picture.size, tiling.max_side))
    if tiling.max_tiles == 1:
        return _stretch(first, tiling)
    rows, columns = layout_around(first.size, tiling.tile[0])
    whole = resized(first, (rows * tiling.tile[0], columns * tiling.tile[1]))
    return _with_overview(whole, split(whole.pixels, tiling.tile), (rows, columns), tiling)


def _covering(picture: Picture, tiling: Tiling) -> Tiles:
    rows, columns = covering_layout(picture.size, tiling.tile[0], tiling.max_tiles)
    tiles = split(picture.at((rows * tiling.tile[0], columns * tiling.tile[1])), tiling.tile)
    return _with_overview(picture, tiles, (rows, columns), tiling)


def _covering_parts(picture: Picture, tiling: Tiling) -> Tiles:
    columns, rows = covering_layout(picture.size, tiling.tile[0], tiling.max_tiles)  # not the other way round here
    down, across = (parts(length, count) for length, count in zip(picture.size, (rows, columns), strict=True))
    pieces = [
        picture.pixels[bottom - height : bottom, right - width : right]
        for bottom, height in zip(itertools.accumulate(down), down, strict=True)
        for right, width in zip(itertools.accumulate(across), across, strict=True)
    ]
    shown = pieces if len(pieces) == 1 else [picture.pixels, *pieces]
    tiles = [
        _fitted(Picture((part.shape[0], part.shape[1]), part, picture.resizer, picture.resample), tiling)
        for part in shown
    ]
    return Tiles(stacked(tiles), (len(tiles), rows, columns))


def _fitted(picture: Picture, tiling: Tiling) -> Pixels:
    """The picture resized to a longer side of a tile's, the other rounded down, centred in a tile."""
    side, (height, width) = tiling.tile[0], picture.size
    size = (side, int(width / height * side)) if height > width else (int(height / width * side), side)
    return centred(picture.at((max(size[0], 1), max(size[1], 1))), tiling.tile, tiling.background)


def _with_overview(
    picture: Picture, tiles: list[Pixels], layout: Size, tiling: Tiling, *, always: bool = False
) -> Tiles:
    if tiling.overview is not Overview.NONE and (always or len(tiles) > 1):
        whole = picture.at(tiling.tile)
        tiles = [whole, *tiles] if tiling.overview is Overview.FIRST else [*tiles, whole]
    return Tiles(stacked(tiles), (len(tiles), *layout))


_RULES: dict[TilingRule, Callable[[Picture, Tiling], Tiles]] = {
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
    TilingRule.WINDOWS: windows,
}
