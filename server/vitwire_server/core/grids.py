"""The patch grid of an item and the counts that follow from it."""

from typing import NamedTuple


class Grid(NamedTuple):
    """Frames (after temporal merging), rows and columns of an item, in patches.

    In tile towers: number of tiles, rows and columns of the layout.
    """

    t: int
    h: int
    w: int

    @property
    def frame_patches(self) -> int:
        return self.h * self.w

    @property
    def patches(self) -> int:
        """Patches of the whole item: the rows of its pixel tensor."""
        return self.t * self.h * self.w

    def __str__(self) -> str:
        return f"{self.t}x{self.h}x{self.w}"


class Footprint(NamedTuple):
    """The size of an item, for the planner.

    Footprints of a batch add up, except for `longest`, which is the maximum.
    """

    patches: int
    """Rows of the pixel tensor: patches, or whole tiles."""
    tokens: int
    """Tokens of a budget: patches per merged area, which are the rows of the embedding before pooling."""
    segments: int
    """Attention segments (frames, unless the tower attends over whole clips)."""
    longest: int
    """Longest attention segment, in patches."""
    crops: int = 0
    """Rows of crops, in towers that take them."""
    pooled: int = 0
    """Rows removed by pooling, in towers that pool; negative if a resampler makes more rows than tokens."""

    @property
    def rows(self) -> int:
        """Rows of the embedding."""
        return self.tokens - self.pooled


def retained(tokens: int, frames: int, keep_ratio: float) -> int:
    """Rows left of a clip's tokens after pruning: the share `keep_ratio`, but at least one frame.

    A ratio of 0 disables pruning.
    """
    return max(tokens // frames, int(tokens * keep_ratio)) if keep_ratio else tokens
