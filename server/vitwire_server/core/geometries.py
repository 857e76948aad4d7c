"""Sizes of towers that take fewer grids than others, or read other things of them: resamplers, layouts, margins."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Geometry, TileGeometry


@dataclass(frozen=True, slots=True)
class ResampledGeometry(Geometry):
    """Sizes of a tower of patches that gives as many rows of every image."""

    @property
    def prunes(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class LayoutGeometry(TileGeometry):
    """Tiles of an image attend to each other, by their places in a layout that the tower knows.

    An image comes with the tiles of its layout, or with as many as any can have, of which the others are blank and
    have rows too.
    """

    layouts: tuple[tuple[int, int], ...] = ()
    """Rows and columns of tiles that an image may have."""
    most: int = 1
    """Tiles that an image can have."""

    def wrong(self, grid: Grid, modality: Modality | None) -> Iterator[tuple[str, str]]:
        del modality
        if (grid.h, grid.w) not in self.layouts:
            known = ", ".join(f"{rows} x {columns}" for rows, columns in self.layouts)
            yield "", f"must have one of the layouts (rows x columns) {known} for this model, got {grid.h} x {grid.w}"
        elif grid.t not in (grid.h * grid.w, self.most):
            yield (
                "t",
                f"must be {grid.h * grid.w} for {grid.h} rows and {grid.w} columns of tiles, or {self.most} with blank "
                f"ones behind them, got {grid.t}",
            )


@dataclass(frozen=True, slots=True)
class MarginGeometry(TileGeometry):
    """A tile whose lower and right margins are background.

    A grid is (1, rows, columns) of the patches that are not background.
    """

    @property
    def side(self) -> int:
        """Patches a side of a tile."""
        return self.tile[0] // self.patch

    def wrong(self, grid: Grid, modality: Modality | None) -> Iterator[tuple[str, str]]:
        del modality
        if grid.t != 1:
            yield "t", f"must be 1 for an image, got {grid.t}; h and w count its patches without background"
        for name, value in (("h", grid.h), ("w", grid.w)):
            if value > self.side:
                yield name, f"must be at most {self.side} for this model, got {value}"


@dataclass(frozen=True, slots=True)
class CanvasGeometry(MarginGeometry):
    """An overview, and tiles of a canvas of any size whose lower and right margins are background."""

    def split(self, grid: Grid) -> tuple[int, int]:
        return 1 + ceil(grid.h / self.side) * ceil(grid.w / self.side), 0

    def wrong(self, grid: Grid, modality: Modality | None) -> Iterator[tuple[str, str]]:
        del modality
        if grid.t != 1:
            yield "t", f"must be 1 for an image, got {grid.t}; h and w count its patches without background"


@dataclass(frozen=True, slots=True)
class PooledFrameGeometry(TileGeometry):
    """Frames of clips give fewer rows than tiles of images, so (t, 1, 1) is always a clip.

    An image has several tiles and one that shows all of it.
    """

    def wrong(self, grid: Grid, modality: Modality | None) -> Iterator[tuple[str, str]]:
        tiles = grid.h * grid.w
        if modality is Modality.VIDEO:
            # Not super(): slots=True creates a second class, which super() does not refer to.
            yield from TileGeometry.wrong(self, grid, modality)
        elif modality is Modality.IMAGE and tiles == 1:
            yield "", f"of an image must be (1 + rows * columns, rows, columns) for this model, got {grid}"
        elif tiles > 1 and grid.t != tiles + 1:
            yield "t", f"must be {tiles + 1} for {grid.h} rows and {grid.w} columns of tiles, got {grid.t}"
