"""Rows and columns of the tiles that an image is cut in, as the processors of each model family choose them."""

import itertools
import math
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np

from vitwire_server.preparing.rules.patches import Size

_COVERED = 0.9
"""Share of an image's pixels that the tiles of Ovis 2 keep."""


@cache
def layouts_of(fewest: int, most: int) -> tuple[Size, ...]:
    """Rows and columns of all layouts with `fewest` to `most` tiles, by number of tiles."""
    pairs = [(rows, columns) for columns in range(1, most + 1) for rows in range(1, most + 1)]
    return tuple(sorted((p for p in pairs if fewest <= p[0] * p[1] <= most), key=lambda pair: pair[0] * pair[1]))


def layout_of_ratio(picture: Size, tile: Size, layouts: Iterable[Size]) -> Size:
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


def layout_of_most(picture: Size, tile: Size, layouts: Sequence[Size]) -> Size:
    """The layout that keeps most pixels of the image; in a tie, the smallest."""
    height, width = picture

    def kept(layout: Size) -> Size:
        down, across = layout[0] * tile[0], layout[1] * tile[1]
        scale = min(across / width, down / height)
        effective = min(int(width * scale) * int(height * scale), width * height)
        return effective, effective - down * across

    return max(layouts, key=kept)


def layout_of_scale(picture: Size, side: int, most: int) -> Size:
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


def at_longest(size: Size, longest: int) -> Size:
    """The size with a longer side of `longest`, enlarged if need be; the shorter side is rounded up to an even number.

    A ratio of floats decides, as in the processor: `longest * height / width` rounds to other numbers.
    """
    ratio = size[1] / size[0]
    shorter = int(longest / ratio) if ratio >= 1 else int(longest * ratio)
    even = max(shorter + shorter % 2, 1)
    return (even, longest) if ratio >= 1 else (longest, even)


def layout_around(size: Size, side: int) -> Size:
    """Rows and columns of the tiles that the picture is enlarged to."""
    ratio = size[1] / size[0]
    if ratio >= 1:
        columns = math.ceil(size[1] / side)
        return math.ceil(int(columns * side / ratio) / side), columns
    rows = math.ceil(size[0] / side)
    return rows, math.ceil(int(rows * side * ratio) / side)


def layout_of_windows(picture: Size, window: int, most: int) -> Size:
    """Rows and columns of windows as large as the image, or of more up to `most`; one where a side fits in a window.

    Very elongated images that need more have one row or column of them, as in the processor.
    """
    height, width = picture
    if min(picture) <= window:
        return 1, 1
    rows, columns = -(-height // window), -(-width // window)
    if rows * columns > most:
        scale = math.sqrt(most / (rows * columns))
        return max(1, math.floor(rows * scale)), max(1, math.floor(columns * scale))
    rows = max(rows, math.floor(math.sqrt(most * height / width)))
    columns = max(columns, math.floor(math.sqrt(most * width / height)))
    return (rows, min(columns, most // rows)) if columns > rows else (min(rows, most // columns), columns)


@cache
def covering_layout(picture: Size, side: int, most: int) -> Size:
    """The fewest tiles that keep enough of the image's pixels; in a tie, those that keep most.

    As in the processor, the image is cut the other way round for this: a row of the layout is a column of the cut.
    """
    height, width = picture
    shares: list[tuple[Size, float]] = []
    for rows, columns in layouts_of(1, most):
        down, across = parts(height, columns), parts(width, rows)
        kept = sum(_kept_of_part(part, side) for part in itertools.product(down, across))
        shares.append(((rows, columns), kept / (width * height)))
    enough = [each for each in shares if each[1] > _COVERED]
    if enough:
        return min(enough, key=lambda each: (math.prod(each[0]), -each[1]))[0]
    return min(shares, key=lambda each: (-each[1], math.prod(each[0])))[0]


def parts(length: int, count: int) -> list[int]:
    """Equal lengths, but for the last one, which has what is left over."""
    part = length // count
    return [*[part] * (count - 1), length - part * (count - 1)]


def _kept_of_part(part: Size, side: int) -> float:
    """Pixels that are left of a part once its longer side is shrunk to a tile's."""
    short, long = sorted(part)
    return short / long * side * side if long > side else short * long
