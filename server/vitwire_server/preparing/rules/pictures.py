"""Pictures that are resized, placed on backgrounds and cut; pixels stay uint8."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from vitwire_server.preparing.rules.patches import CHANNELS, Grid, Pixels, Size

Resizer = Callable[[Pixels, Size, int], Pixels]
"""Resizes a picture to a size, with a resampling filter."""


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


@runtime_checkable
class Canvas(Protocol):
    """Pixels elsewhere than in numpy: `(H, W, 3)`, cut by slices as arrays are."""

    def placed(self, size: Size, corner: Size, background: tuple[int, ...]) -> Pixels:
        """The pixels on a larger background."""
        ...

    def stacked(self, tiles: Sequence[Pixels]) -> Pixels:
        """(tiles, 3, H, W) of tiles like these."""
        ...


class Outline(np.ndarray[tuple[int, ...], np.dtype[np.uint8]]):
    """Stands for pixels of which only the shape matters; takes no memory."""

    def placed(self, size: Size, corner: Size, background: tuple[int, ...]) -> Pixels:
        """See Canvas."""
        del corner, background
        return outline((*size, CHANNELS))

    def stacked(self, tiles: Sequence[Pixels]) -> Pixels:
        """See Canvas."""
        return outline((len(tiles), CHANNELS, *self.shape[:2]))


def outline(shape: tuple[int, ...]) -> Outline:
    """Pixels of this shape."""
    return np.broadcast_to(np.zeros((), np.uint8).view(Outline), shape, subok=True)  # type: ignore[return-value]


def outline_resizer(pixels: Pixels, size: Size, resample: int) -> Pixels:
    """Resizes outlines."""
    del pixels, resample
    return outline((*size, CHANNELS))


def resized(picture: Picture, size: Size) -> Picture:
    return Picture(size, picture.at(size), picture.resizer, picture.resample)


def squared(
    picture: Picture, side: int, background: tuple[int, ...], min_side: int = 0, resample: int | None = None
) -> Pixels:
    """The picture resized to a longer side of `side`, centred in a square."""
    scale = side / max(picture.size)
    height, width = (max(round(length * scale), min_side, 1) for length in picture.size)
    return centred(picture.at((height, width), resample), (side, side), background)


def padded(picture: Picture, size: Size, background: tuple[int, ...]) -> Pixels:
    """The picture enlarged or shrunk to a size in its own shape, centred; as `PIL.ImageOps.pad` rounds."""
    (height, width), (down, across) = picture.size, size
    if width / height > across / down:
        down = round(height / width * across)
    elif width / height < across / down:
        across = round(width / height * down)
    if not down or not across:
        raise ValueError(f"{height}x{width} is too elongated for this model")
    corner = (round((size[0] - down) * 0.5), round((size[1] - across) * 0.5))
    return placed(picture.at((down, across)), size, corner, background)


def centred(pixels: Pixels, size: Size, background: tuple[int, ...]) -> Pixels:
    top, left = ((whole - own) // 2 for whole, own in zip(size, pixels.shape, strict=False))
    return placed(pixels, size, (top, left), background)


def placed(pixels: Pixels, size: Size, corner: Size, background: tuple[int, ...]) -> Pixels:
    if pixels.shape[:2] == size:
        return pixels
    if isinstance(pixels, Canvas):
        return pixels.placed(size, corner, background)
    canvas: npt.NDArray[np.uint8] = np.empty((*size, CHANNELS), np.uint8)
    canvas[:] = background or 0
    top, left = corner
    canvas[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
    return canvas


def split(whole: Pixels, size: Size) -> list[Pixels]:
    """Tiles (H, W, 3) of a canvas, row by row."""
    height, width = size
    return [
        whole[y : y + height, x : x + width]
        for y in range(0, whole.shape[0], height)
        for x in range(0, whole.shape[1], width)
    ]


def stacked(tiles: list[Pixels]) -> Pixels:
    """(tiles, 3, H, W) of tiles (H, W, 3)."""
    if isinstance(tiles[0], Canvas):
        return tiles[0].stacked(tiles)
    return np.ascontiguousarray(np.stack(tiles).transpose(0, 3, 1, 2))
