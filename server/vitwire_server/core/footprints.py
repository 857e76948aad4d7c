"""How much items of each kind of tower cost: functions of the grid alone, without the tower."""

from dataclasses import dataclass
from typing import Protocol

from vitwire_server.core.grids import Footprint, Grid


class Footprints(Protocol):
    """The footprint of an item by its grid. Picklable, so that processes without the tower can use it."""

    def __call__(self, grid: Grid) -> Footprint:
        """The grid must be one that the geometry finds nothing wrong about."""
        ...


@dataclass(frozen=True, slots=True)
class PatchFootprints:
    """Items of patches."""

    merge: int
    clip_is_segment: bool = False
    """Attention spans a whole clip; otherwise one frame."""
    pooled: int = 1
    """Tokens, each of one frame, that a clip's token is made of; 0 for those of all frames."""

    def __call__(self, grid: Grid) -> Footprint:
        tokens = grid.patches // self.merge**2
        segments, longest = (1, grid.patches) if self.clip_is_segment else (grid.t, grid.frame_patches)
        kept = tokens // (self.pooled or grid.t) if grid.t > 1 else tokens
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
    """Of one tile."""
    longest: int
    """Patches of one tile."""
    paired: bool = False
    """Each tile comes with a crop."""

    def __call__(self, grid: Grid) -> Footprint:
        return Footprint(grid.t, grid.t * self.tokens, grid.t, self.longest, crops=grid.t if self.paired else 0)


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
