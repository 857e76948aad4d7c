"""Clips whose rows leave while others are computed: cut into parts, and put together again."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from vitwire_server.core.errors import EncoderError
from vitwire_server.core.items import Embedding, Item, Pixels
from vitwire_server.core.reports import Encoded, Outcome


@dataclass(slots=True, eq=False)
class Clip:
    """A clip whose parts run in order. Used by the engine's thread only."""

    item: Item
    rows: memoryview
    """Memory for all its rows, of which the first `filled` are complete."""
    filled: int = 0
    failed: bool = False

    def add(self, outcome: Outcome) -> Outcome | None:
        """From the outcome of the next part: the clip with the rows that are new, or its first error; None after it."""
        if self.failed or isinstance(outcome, EncoderError):
            error, self.failed = None if self.failed else outcome, True
            return error
        (count, width), total = outcome.embedding.shape, self.item.rows
        start, self.filled = self.filled, self.filled + count
        rows = np.frombuffer(self.rows, np.uint8).reshape(total, -1)
        rows[start : self.filled] = np.frombuffer(outcome.embedding.data, np.uint8).reshape(count, -1)
        whole = Embedding(self.rows, self.item.output, (total, width))
        return Encoded(whole, replace(outcome.report, tokens=total), new=(start, self.filled))


def parts_of(item: Item, capacity: int, temporal: int) -> Iterator[Item]:
    """Parts of a clip, in groups of frames; none of an item that runs whole.

    A part has one group, or at most a fourth of a batch's tokens: smaller parts are slower in all. Patches are of
    `temporal` frames. Only whole clips are pruned, stored, or delivered into a region.
    """
    t, whole, pixels = item.grid.t, item.footprint, item.pixels
    count = -(-t // max(1, capacity // 4 * t // whole.tokens))
    if not item.in_groups or item.keep_ratio or item.store_only or item.region or count == 1:
        return
    data, row_bytes = memoryview(pixels.data), pixels.nbytes // pixels.shape[0]
    per_group = temporal if item.is_picture else pixels.shape[0] // t
    for number in range(count):
        first, last = number * t // count, (number + 1) * t // count
        start, end = first * per_group, min(last * per_group, pixels.shape[0])  # the last group may lack frames
        own = Pixels(data[start * row_bytes : end * row_bytes], pixels.dtype, (end - start, *pixels.shape[1:]))
        sizes = {name: getattr(whole, name) * (last - first) // t for name in ("patches", "tokens", "segments")}
        grid, footprint = item.grid._replace(t=last - first), whole._replace(**sizes)
        yield replace(item, grid=grid, pixels=own, footprint=footprint)
