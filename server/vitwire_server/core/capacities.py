"""Budgets that a tower can have: of any tokens, of whole tiles, or of overviews and crops."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

from vitwire_server.core.budgets import Budget, budget
from vitwire_server.core.grids import Footprint

_CROPS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 36, 48, 64)
"""Crops of budgets for one image."""
_OVERVIEWS, _CROPS_PER_OVERVIEW = (2, 4, 8, 16, 32), (0, 1, 2, 4)
"""Images, and crops of each, of budgets for several."""


class Capacities(ABC):
    """The budgets that a tower can have."""

    @abstractmethod
    def budget(self, tokens: int, *, max_items: int, max_frames: int) -> Budget:
        """The largest of at most `tokens`, or the smallest of all."""

    def needed(self, load: Footprint) -> int | None:
        """Tokens of the smallest budget that holds a load; None if none does."""
        return load.tokens


@dataclass(frozen=True, slots=True)
class PackedCapacities(Capacities):
    """Budgets of any number of tokens."""

    merge: int

    def budget(self, tokens: int, *, max_items: int, max_frames: int) -> Budget:
        return budget(tokens, merge=self.merge, max_items=max_items, max_frames=max_frames)


@dataclass(frozen=True, slots=True)
class ResampledCapacities(Capacities):
    """Budgets of any number of patches that an image can have; a slot for one costs as many rows as there are queries.

    Processors make images of many times as many patches as queries, so slots are for images of four times as many.
    """

    queries: int

    def budget(self, tokens: int, *, max_items: int, max_frames: int) -> Budget:
        tokens = max(tokens, self.queries)
        images = max(1, tokens // (4 * self.queries))
        return budget(tokens, merge=1, max_items=max_items, max_frames=min(max_frames, images))


@dataclass(frozen=True, slots=True)
class TileCapacities(Capacities):
    """Budgets of whole tiles: a tile is a segment whatever it shows, and costs the same."""

    tile: int
    """Tokens of a tile."""
    longest: int
    """Patches of a tile."""
    paired: bool = False
    """Every tile comes in a second size too."""
    fewest: int = 1
    """Tiles of the smallest item."""

    def budget(self, tokens: int, *, max_items: int, max_frames: int) -> Budget:
        del max_frames
        tiles = max(self.fewest, tokens // self.tile)
        return Budget(
            tokens=tiles * self.tile,
            max_items=min(max_items, tiles),
            max_segments=tiles,
            max_segment_patches=self.longest,
            max_crops=tiles if self.paired else 0,
        )


@dataclass(frozen=True)
class CropCapacities(Capacities):
    """Budgets of a number of overviews and a number of crops, from a list of both."""

    overview: int
    """Tokens of an overview."""
    crop: int
    """Tokens of a crop."""
    longest: int
    """Patches of an overview."""

    @cached_property
    def shares(self) -> dict[int, tuple[int, int]]:
        """Overviews and crops of every budget there can be, by their tokens, ascending."""
        pairs = [(1, crops) for crops in _CROPS]
        pairs += [(overviews, overviews * crops) for overviews in _OVERVIEWS for crops in _CROPS_PER_OVERVIEW]
        shares = {self.tokens(*pair): pair for pair in reversed(pairs)}  # if two are equal, the first counts
        return dict(sorted(shares.items()))

    def tokens(self, overviews: int, crops: int) -> int:
        return overviews * self.overview + crops * self.crop

    def share(self, tokens: int) -> tuple[int, int]:
        """Overviews and crops of the largest budget of at most `tokens`, or of the smallest of all."""
        return self.shares[max((size for size in self.shares if size <= tokens), default=min(self.shares))]

    def budget(self, tokens: int, *, max_items: int, max_frames: int) -> Budget:
        del max_frames
        overviews, crops = self.share(tokens)
        return Budget(
            tokens=self.tokens(overviews, crops),
            max_items=min(overviews, max_items),
            max_segments=overviews + crops,
            max_segment_patches=self.longest,
            max_crops=crops,
        )

    def needed(self, load: Footprint) -> int | None:
        fitting = (
            size
            for size, (overviews, crops) in self.shares.items()
            if load.patches <= overviews and load.crops <= crops
        )
        return next(fitting, None)
