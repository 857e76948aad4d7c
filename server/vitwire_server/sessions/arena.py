"""Memory that all processes of a server share: pixels are written once, rows once."""

import mmap
import os
from bisect import bisect_right
from collections import deque
from contextlib import suppress
from threading import Lock
from weakref import finalize

import numpy as np

from vitwire_server.core.errors import Overloaded

_PAGE = mmap.PAGESIZE
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14, which Python does not name."""


class Arena:
    """One mapping of an anonymous file, by the process that made it or one that inherited the descriptor.

    Its pages exist once they are written, so the size may be far larger than the memory of the machine.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        self._map = mmap.mmap(descriptor, size)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.address: int = self._bytes.ctypes.data

    @classmethod
    def create(cls, size: int) -> "Arena":
        """A new arena of at least `size` bytes. Raises OSError."""
        descriptor = os.memfd_create("vitwire")
        size = -(-size // _PAGE) * _PAGE
        os.ftruncate(descriptor, size)
        return cls(descriptor, size)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes; the view keeps the mapping, not the block, alive."""
        return self._bytes[offset : offset + nbytes].data

    def array(self, offset: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """A new array over bytes of the arena."""
        return np.frombuffer(self._map, np.uint8, nbytes, offset)

    def offset_of(self, data: memoryview) -> int | None:
        """Where bytes lie in the arena; None if they lie elsewhere."""
        offset: int = np.frombuffer(data, np.uint8).ctypes.data - self.address
        return offset if 0 <= offset <= self.size - len(data) else None

    def touch(self, nbytes: int) -> None:
        """Bring the first `nbytes` bytes into memory now: the first write to a page is slower than the wire."""
        with suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE, 0, nbytes)
        try:
            self._map.madvise(_POPULATE_WRITE, 0, nbytes)
        except OSError:  # an older kernel
            self._bytes[:nbytes:_PAGE] = 0

    def discard(self, start: int, end: int) -> None:
        """Give the pages of a range back to the system."""
        with suppress(OSError):
            self._map.madvise(mmap.MADV_REMOVE, start, end - start)


class ArenaMemory:
    """Hands out blocks of an arena. Thread-safe; belongs to the process that owns the arena.

    First fit by address, so that the pages in use stay few and those touched first are used most. No block crosses the
    end of the kept bytes: CUDA refuses copies of memory that is pinned in part.
    """

    def __init__(self, arena: Arena, kept: int) -> None:
        """Free pages beyond the first `kept` bytes are given back to the system."""
        self.arena = arena
        self.kept = min(arena.size, kept // _PAGE * _PAGE)
        self._lock = Lock()
        bounds = sorted({0, self.kept, arena.size})
        self._starts, self._ends = bounds[:-1], bounds[1:]
        """Free ranges, ascending; two touch only at the end of the kept bytes."""
        self._dropped: deque[tuple[int, int]] = deque()
        """Blocks whose last view is gone: finalisers may run anywhere, so they take no lock."""

    def allocate(self, nbytes: int) -> memoryview:
        """A block, free again when the last view of it is gone. Raises Overloaded if none is large enough."""
        size = max(1, -(-nbytes // _PAGE)) * _PAGE
        with self._lock:
            self._collect()
            start = self._take(size)
        block = self.arena.array(start, nbytes)
        finalize(block, self._dropped.append, (start, start + size)).atexit = False
        return block.data

    @property
    def free(self) -> int:
        """Bytes that no block holds."""
        with self._lock:
            self._collect()
            return sum(self._ends) - sum(self._starts)

    def _take(self, size: int) -> int:
        for index, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= size:
                if end - start == size:
                    del self._starts[index], self._ends[index]
                else:
                    self._starts[index] = start + size
                return start
        raise Overloaded("the shared memory of the server's processes is full", reason="bytes", retry_seconds=1.0)

    def _collect(self) -> None:
        while self._dropped:
            start, end = self._dropped.popleft()
            if end > self.kept:
                self.arena.discard(max(start, self.kept), end)
            self._give_back(start, end)

    def _give_back(self, start: int, end: int) -> None:
        index = bisect_right(self._starts, start)
        if index < len(self._starts) and self._starts[index] == end != self.kept:
            end = self._ends[index]
            del self._starts[index], self._ends[index]
        if index and self._ends[index - 1] == start != self.kept:
            self._ends[index - 1] = end
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)
