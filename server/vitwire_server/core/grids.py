"""The patch grid of an item: the only source of its counts, on the host."""

from typing import NamedTuple


class Grid(NamedTuple):
    """Frames (after temporal merging), rows and columns of an item, in patches.

    In tile towers: how many tiles, and the rows and columns that they were cut in.
    """

    t: int
    h: int
    w: int

    @property
    def frame_patches(self) -> int:
        """Patches of one frame."""
        return self.h * self.w

    @property
    def patches(self) -> int:
        """Patches of the whole item: the rows of its pixel tensor."""
        return self.t * self.h * self.w

    def __str__(self) -> str:
        return f"{self.t}x{self.h}x{self.w}"


class Footprint(NamedTuple):
    """What an item costs: everything the planner needs to know of it.

    Counts are for one item; footprints of a batch add up (`longest` by maximum).
    """

    patches: int
    """Rows of the pixel tensor: patches, or whole tiles."""
    tokens: int
    """Tokens of a budget: patches over the merged area. Rows of the embedding, and those that pooling takes off."""
    segments: int
    """Attention segments (frames, unless the tower attends over whole clips)."""
    longest: int
    """Longest attention segment, in patches."""
    crops: int = 0
    """Rows of crops, in towers that take them."""
    pooled: int = 0
    """Rows that pooling over frames takes off, in towers that do so."""

    @property
    def rows(self) -> int:
        """Rows of the embedding."""
        return self.tokens - self.pooled


def retained(tokens: int, frames: int, keep_ratio: float) -> int:
    """Rows that pruning leaves of a clip's tokens: the share asked for, but at least one whole frame.

    A ratio of 0 switches pruning off.
    """
    return max(tokens // frames, int(tokens * keep_ratio)) if keep_ratio else tokens
