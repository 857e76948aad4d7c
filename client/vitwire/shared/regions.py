"""Allocation of parts of one memory, shared by client and server."""

import threading
from bisect import bisect
from typing import NamedTuple

ALIGNMENT = 4096
"""Regions start at multiples of a page and fill whole pages."""


class Region(NamedTuple):
    """A part of a memory: offset and bytes."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class Regions:
    """Hands out parts of `size` bytes, the first that fits, so that little memory is ever touched. Thread-safe."""

    def __init__(self, size: int) -> None:
        self._size = size // ALIGNMENT * ALIGNMENT
        self._lock = threading.Lock()
        self._free = [Region(0, self._size)] if self._size else []
        """Ascending, never adjacent."""

    @property
    def size(self) -> int:
        """Bytes of all regions together."""
        return self._size

    @property
    def free(self) -> int:
        """Bytes that are not taken; they may not be contiguous."""
        with self._lock:
            return sum(region.nbytes for region in self._free)

    def take(self, nbytes: int) -> Region | None:
        """A region of at least `nbytes`; None without room."""
        needed = rounded(nbytes)
        with self._lock:
            for position, region in enumerate(self._free):
                if region.nbytes >= needed:
                    rest = Region(region.offset + needed, region.nbytes - needed)
                    self._free[position : position + 1] = [rest] if rest.nbytes else []
                    return Region(region.offset, needed)
        return None

    def give_back(self, region: Region) -> None:
        """Free a region that `take` returned, once."""
        with self._lock:
            position = bisect(self._free, region)
            if position < len(self._free) and self._free[position].offset == region.end:
                region = Region(region.offset, region.nbytes + self._free.pop(position).nbytes)
            if position and self._free[position - 1].end == region.offset:
                position -= 1
                before = self._free.pop(position)
                region = Region(before.offset, before.nbytes + region.nbytes)
            self._free.insert(position, region)


def rounded(nbytes: int) -> int:
    """Bytes of the region that holds `nbytes`."""
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
