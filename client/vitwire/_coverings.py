"""The layout of Ovis 2: the fewest tiles that keep most of an image's pixels."""

import itertools
import math
from functools import cache

_COVERED = 0.9
"""Share of an image's pixels that its tiles keep."""


@cache
def covering_layout(picture: tuple[int, int], side: int, most: int) -> tuple[int, int]:
    """The fewest tiles that keep enough of the image's pixels; in a tie, those that keep most.

    As in the processor, the image is cut the other way round for this: a row of the layout is a column of the cut.
    """
    height, width = picture
    shares: list[tuple[tuple[int, int], float]] = []
    for columns, rows in _layouts(most):
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


def _kept_of_part(part: tuple[int, int], side: int) -> float:
    """Pixels that are left of a part once its longer side is shrunk to a tile's."""
    short, long = sorted(part)
    return short / long * side * side if long > side else short * long


def _layouts(most: int) -> list[tuple[int, int]]:
    """Columns and rows of at most so many tiles, by their number."""
    sides = range(1, most + 1)
    return sorted(((x, y) for x in sides for y in sides if x * y <= most), key=math.prod)
