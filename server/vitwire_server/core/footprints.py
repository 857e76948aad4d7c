"""Costs of items for each kind of tower: functions of the grid alone, without the tower."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import TypeAlias

from vitwire_server.core.grids import Footprint, Grid

Footprints: TypeAlias = Callable[[Grid], Footprint]
"""The footprint of an item by a grid that the geometry finds nothing wrong about.

Picklable, so that processes without the tower can use it.
"""


@dataclass(frozen=True, slots=True)
class PatchFootprints:
    """Items of patches."""

    merge: int
    clip_is_segment: bool = False
    """Attention spans a whole clip; otherwise one frame."""
    pooled: int = 1
    """Tokens, each of one frame, that a clip's token is made of; 0 for all frames."""
    one_row: bool = False
    """A frame has one row, whatever its tokens."""
    line_ends: bool = False
    """Each line of tokens has one more behind it."""

    def __call__(self, grid: Grid) -> Footprint:
        tokens = grid.patches // self.merge**2 + grid.t * grid.h // self.merge * self.line_ends
        segments, longest = (1, grid.patches) if self.clip_is_segment else (grid.t, grid.frame_patches)
        kept = grid.t if self.one_row else tokens // (self.pooled or grid.t) if grid.t > 1 else tokens
        return Footprint(grid.patches, tokens, segments, longest, pooled=tokens - kept)


@dataclass(frozen=True, slots=True)
class ResampledFootprints:
    """Items of patches that become as many rows a frame as there are queries: a patch is a token of a budget."""

    queries: int

    def __call__(self, grid: Grid) -> Footprint:
        patches = grid.patches
        return Footprint(patches, patches, grid.t, grid.frame_patches, pooled=patches - grid.t * self.queries)


@dataclass(frozen=True, slots=True)
class TileFootprints:
    """Items of tiles."""

    tokens: int
    """Tokens of one tile."""
    longest: int
    """Patches of one tile."""
    paired: bool = False
    """Each tile comes with a crop."""
    one_row: bool = False
    """A tile has one row, whatever its tokens."""
    rows: int = 0
    """Rows of an item whose tiles are merged, whatever their number; 0 if they are not."""

    def __call__(self, grid: Grid) -> Footprint:
        merged = grid.t * self.tokens - self.rows if self.rows else 0
        pooled = grid.t * (self.tokens - 1) if self.one_row else merged
        crops = grid.t if self.paired else 0
        return Footprint(grid.t, grid.t * self.tokens, grid.t, self.longest, crops, pooled)


@dataclass(frozen=True, slots=True)
class CropFootprints:
    """Items of an overview and crops."""

    overview_tokens: int
    crop_tokens: int
    longest: int
    """Patches of the overview."""

    def __call__(self, grid: Grid) -> Footprint:
        crops = grid.t - 1
        return Footprint(1, self.overview_tokens + crops * self.crop_tokens, 1 + crops, self.longest, crops)


@dataclass(frozen=True, slots=True)
class LayoutFootprints:
    """Items of tiles, computed with as many tiles as an image can have; only the item's tiles give rows."""

    tokens: int
    """Tokens of one tile."""
    most: int
    """Tiles that an image can have."""
    longest: int
    """Patches of that many tiles."""

    def __call__(self, grid: Grid) -> Footprint:
        absent = self.most - grid.t
        return Footprint(grid.t, self.most * self.tokens, 1, self.longest, pooled=absent * self.tokens)


@dataclass(frozen=True, slots=True)
class CanvasFootprints:
    """Items of an overview and of tiles of a canvas, by the patches of it that are not background."""

    side: int
    """Patches a side of a tile."""
    merge: int
    """Root of the patches that become one row."""

    @property
    def tokens(self) -> int:
        """Tokens of a budget for one tile: its rows, an end for each line of them, and a separator."""
        lines = self.side // self.merge
        return lines * (lines + 1) + 1

    def __call__(self, grid: Grid) -> Footprint:
        tiles = 1 + ceil(grid.h / self.side) * ceil(grid.w / self.side)
        rows = self.tokens + ceil(grid.h / self.merge) * (ceil(grid.w / self.merge) + 1)
        tokens = tiles * self.tokens
        return Footprint(tiles, tokens, tiles, self.side**2, pooled=tokens - rows)


@dataclass(frozen=True, slots=True)
class PooledFrameFootprints:
    """Items of tiles, which give fewer rows as frames of a clip, whose grid is (frames, 1, 1), than of an image."""

    tokens: int
    """Tokens of one tile."""
    frame: int
    """Rows of one frame."""
    longest: int
    """Patches of one tile."""

    def __call__(self, grid: Grid) -> Footprint:
        pooled = self.tokens - self.frame if grid.h * grid.w == 1 else 0
        return Footprint(grid.t, grid.t * self.tokens, grid.t, self.longest, pooled=grid.t * pooled)
