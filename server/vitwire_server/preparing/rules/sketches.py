"""Pictures that only remember how they are made: rules work on sketches, which Pillow or a device then draws.

A canvas is a box of a picture, resized and placed on a background. A rule that resizes a canvas again makes one whose
source is the other.
"""

from collections.abc import Sequence
from typing import NamedTuple

from vitwire_server.preparing.rules.patches import Grid, Size


class Frame(NamedTuple):
    """The picture that preparation starts from."""

    whole: Size


class Canvas(NamedTuple):
    """A box of a picture, resized and placed; equal canvases have equal pixels."""

    source: "Sketch"
    size: Size
    """Size of the resized box."""
    resample: int
    corner: Size
    """Corner of the resized box on the canvas."""
    whole: Size
    """Size of the canvas."""
    background: tuple[int, ...]


class Sketch(NamedTuple):
    """A rectangle of a picture."""

    of: Frame | Canvas
    corner: Size
    size: Size
    resample: int
    """Filter for resizing it, unless a rule names another."""

    def at(self, size: Size, resample: int | None = None) -> "Sketch":
        """The rectangle at a size; itself if it has that size."""
        if self.size == size:
            return self
        chosen = self.resample if resample is None else resample
        return self._all_of(Canvas(self, size, chosen, (0, 0), size, ()))

    def part(self, corner: Size, size: Size) -> "Sketch":
        """A rectangle of the rectangle, whose border it ends at."""
        height, width = (min(length, whole - at) for length, whole, at in zip(size, self.size, corner, strict=True))
        corner = (self.corner[0] + corner[0], self.corner[1] + corner[1])
        return self._replace(corner=corner, size=(height, width))

    def split(self, size: Size) -> list["Sketch"]:
        """Parts of a size, row by row."""
        height, width = size
        rows, columns = range(0, self.size[0], height), range(0, self.size[1], width)
        return [self.part((row, column), size) for row in rows for column in columns]

    def middle(self, size: Size) -> "Sketch":
        """The part in the middle."""
        return self.part(_margins(self.size, size), size)

    def placed(self, size: Size, corner: Size, background: tuple[int, ...]) -> "Sketch":
        """The rectangle on a larger background; itself if it has that size."""
        if self.size == size:
            return self
        of = self.of
        if isinstance(of, Canvas) and of.whole == of.size == self.size:
            return self._all_of(of._replace(corner=corner, whole=size, background=background))
        return self._all_of(Canvas(self, self.size, 0, corner, size, background))

    def centred(self, size: Size, background: tuple[int, ...]) -> "Sketch":
        """The rectangle in the middle of a larger background."""
        return self.placed(size, _margins(size, self.size), background)

    def squared(
        self, side: int, background: tuple[int, ...], min_side: int = 0, resample: int | None = None
    ) -> "Sketch":
        """The rectangle resized to a longer side of `side`, centred in a square."""
        scale = side / max(self.size)
        height, width = (max(round(length * scale), min_side, 1) for length in self.size)
        return self.at((height, width), resample).centred((side, side), background)

    def padded(self, size: Size, background: tuple[int, ...]) -> "Sketch":
        """The rectangle enlarged or shrunk to a size in its shape, centred; as `PIL.ImageOps.pad` rounds."""
        (height, width), (down, across) = self.size, size
        if width / height > across / down:
            down = round(height / width * across)
        elif width / height < across / down:
            across = round(width / height * down)
        if not down or not across:
            raise ValueError(f"{height}x{width} is too elongated for this model")
        corner = (round((size[0] - down) * 0.5), round((size[1] - across) * 0.5))
        return self.at((down, across)).placed(size, corner, background)

    def _all_of(self, canvas: Canvas) -> "Sketch":
        return Sketch(canvas, (0, 0), canvas.whole, self.resample)


class Drawing(NamedTuple):
    """The grid of a prepared picture, and the rectangles that it is made of."""

    grid: Grid
    tiles: Sequence[Sketch]
    """All of one size; or the whole resized frame of a model that takes patches."""
    crops: Sequence[Sketch] = ()


def _margins(outer: Size, inner: Size) -> Size:
    return (outer[0] - inner[0]) // 2, (outer[1] - inner[1]) // 2
