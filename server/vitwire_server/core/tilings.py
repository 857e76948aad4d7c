"""Cutting an image into tiles of one size."""

from dataclasses import dataclass
from enum import StrEnum


class TilingRule(StrEnum):
    """Rule for the layout of an image's tiles."""

    STRETCH = "stretch"
    """One tile, to which the image is resized whatever its shape."""
    SQUARE = "square"
    """One tile, into which the image is resized in its own shape; the rest is background."""
    CENTER_CROP = "center_crop"
    """One tile: the middle of the image, whose shorter side is resized to `min_side`."""
    STRETCHED_CROP = "stretched_crop"
    """One tile: the middle of the image, which is resized to a square of `min_side` whatever its shape."""
    CLOSEST_RATIO = "closest_ratio"
    """The layout whose shape is nearest to the image's, which is stretched over it."""
    TWO_RATIOS = "two_ratios"
    """That layout and a finer one: the finer one's tiles, the other's, and the whole image."""
    RATIO_AND_AREA = "ratio_and_area"
    """The layout whose shape is nearest to the image's among layouts of enough pixels."""
    BEST_FIT = "best_fit"
    """The listed layout that keeps most of the image; it is centred on background."""
    PADDED_FIT = "padded_fit"
    """The same, always with the overview; both keep the image's shape, in the middle of background."""
    CANVAS = "canvas"
    """The layout, of all, that scales the image least; it lies top left on background."""
    LEAST_SCALING = "least_scaling"
    """The same layout; the image is stretched over it."""
    WHOLE_TILES = "whole_tiles"
    """The longer side becomes `max_side`, then the image is stretched to whole tiles, from which all tiles are made."""
    COVERING = "covering"
    """The fewest tiles that show most of the image when each shows a part of it in its own shape, as Ovis 2 has it."""
    COVERING_PARTS = "covering_parts"
    """The same tiles, each of which shows its part of the image in its own shape, centred on background."""
    CORNER = "corner"
    """One tile, into which the image is resized in its own shape, top left on background; grids count its patches."""
    WINDOWS = "windows"
    """Square windows over an image that is too large or too long for the overview alone; each is resized to a crop."""

    OVERLAPPING = "overlapping"
    """The whole image, and tiles of it that overlap by twice the `margin`, also if there is one tile only."""


class Overview(StrEnum):
    """Position of the tile that shows the whole of an image that was cut into several."""

    NONE = "none"
    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Tiling:
    """Settings of the rule; those that a rule does not use keep their defaults."""

    rule: TilingRule
    tile: tuple[int, int]
    """Height and width of a tile, in pixels."""
    overview: Overview = Overview.NONE
    min_tiles: int = 1
    max_tiles: int = 1
    layouts: tuple[tuple[int, int], ...] = ()
    """Rows and columns of tiles to choose from, instead of all from `min_tiles` to `max_tiles`."""
    background: tuple[int, ...] = ()
    """Value of each channel where there is no image, before rescaling; zero if empty."""
    min_side: int = 0
    """Neither side of a resized image is shorter; CENTER_CROP: length of the shorter one. STRETCHED_CROP: of both."""
    max_side: int = 0
    """Larger images are resized to this longer side before anything else; 0 leaves them."""
    crop: tuple[int, int] | None = None
    """Height and width of a crop; None if the tower takes none."""
    crop_background: tuple[int, ...] = ()
    patch: int = 0
    """Side of the patches that grids count, in pixels; 0 if they count tiles."""
    margin: int = 0
    """Pixels at each side of a tile that its neighbours show too."""
    crop_resample: int | None = None
    """Pillow's number of the filter for crops, if it is another one."""
