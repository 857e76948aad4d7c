"""Windows over an image that is too large or too long for its overview alone, as Step3-VL cuts them."""

from vitwire_server.core.decoding import MAX_PICTURE_PIXELS
from vitwire_server.core.tilings import Tiling
from vitwire_server.preparing.rules.patches import Size
from vitwire_server.preparing.rules.pictures import Picture, Tiles, placed, stacked

_ELONGATED, _VERY_ELONGATED = 1.5, 4
_NARROW = 32
_ROUNDED_UP = 0.2
"""Minimum remainder, as a share of a window, that gets its own window."""


def windows(picture: Picture, tiling: Tiling) -> Tiles:
    assert tiling.crop is not None, "windows become crops"
    if min(picture.size) < _NARROW and max(picture.size) > _VERY_ELONGATED * min(picture.size):
        side = max(picture.size)
        if side * side > MAX_PICTURE_PIXELS:
            raise ValueError(f"{picture.size[0]}x{picture.size[1]} is too elongated for this model")
        square = placed(picture.pixels, (side, side), (0, 0), ())
        picture = Picture((side, side), square, picture.resizer, picture.resample)
    bounded = _bounded(picture.size, tiling.max_side)
    first = Picture(bounded, picture.at(bounded), picture.resizer, picture.resample)
    view = stacked([first.at(tiling.tile)])
    window = _window(bounded, tiling.tile[0], tiling.crop[0])
    if not window:
        return Tiles(view, (1, 1, 1))
    height, width = (_snapped(length, window) for length in bounded)
    rows, columns = max(1, height // window), max(1, width // window)
    whole = picture.at((height, width))
    parts = [whole[y : y + window, x : x + window] for y in range(0, height, window) for x in range(0, width, window)]
    crops = stacked([picture.resizer(part, tiling.crop, picture.resample) for part in parts])
    return Tiles(view, (1 + rows * columns, rows, columns), crops)


def _bounded(size: Size, longest: int) -> Size:
    if not longest or max(size) <= longest:
        return size
    scale = longest / max(size)
    height, width = int(size[0] * scale), int(size[1] * scale)
    if not height or not width:
        raise ValueError(f"{size[0]}x{size[1]} is too elongated for this model")
    return height, width


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
