"""Memory that all processes of a server share: pixels are written once, rows once."""

import mmap
import os
from collections import deque
from contextlib import suppress
from ctypes import addressof, c_char
from typing import Protocol
from weakref import ref

import numpy as np

from vitwire.shared.regions import Region, Regions
from vitwire_server.core.errors import Overloaded

_PAGE = mmap.PAGESIZE
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14, which Python does not name."""


class Arena:
    """One mapping of an anonymous file, by the process that made it or one that inherited the descriptor.

    Its pages exist once they are written, so the size may be far larger than the memory of the machine.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.size = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.size)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.address: int = self._bytes.ctypes.data

    @classmethod
    def create(cls, size: int) -> "Arena":
        """A new arena of at least `size` bytes. Raises OSError."""
        descriptor = os.memfd_create("vitwire")
        os.ftruncate(descriptor, -(-size // _PAGE) * _PAGE)
        return cls(descriptor)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes; the view keeps the mapping, not the block, alive."""
        return self._bytes[offset : offset + nbytes].data

    def array(self, offset: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """A new array over bytes of the arena."""
        return np.frombuffer(self._map, np.uint8, nbytes, offset)

    def offset_of(self, data: memoryview) -> int | None:
        """The offset of bytes in the arena; None if they lie elsewhere."""
        if data.readonly or not data:
            address: int = np.frombuffer(data, np.uint8).ctypes.data
        else:
            address = addressof(c_char.from_buffer(data))  # a tenth of the time
        offset = address - self.address
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


class Memory(Protocol):
    """Receives the pixels of items."""

    def allocate(self, nbytes: int) -> memoryview:
        """Writable memory, which is free again when the last view of it is gone. Raises Overloaded."""
        ...


class PrivateMemory:
    """Memory of this process."""

    def allocate(self, nbytes: int) -> memoryview:
        return np.empty(nbytes, np.uint8).data


class _Block(ref[np.ndarray[tuple[int], np.dtype[np.uint8]]]):
    """A weak reference to the array that all views of a block refer to. It is lighter than `weakref.finalize`."""

    __slots__ = ("region", "start")
    start: int
    """Where the part of the arena begins that the region is taken from."""
    region: Region


class ArenaMemory:
    """Hands out blocks of an arena. Thread-safe; belongs to the process that owns the arena.

    First fit by address, so that the pages in use stay few and those touched first are used most. No block crosses the
    end of the kept bytes: CUDA refuses copies of memory that is pinned in part.
    """

    def __init__(self, arena: Arena, kept: int) -> None:
        """Free pages beyond the first `kept` bytes are given back to the system."""
        self.arena = arena
        self.kept = min(arena.size, kept // _PAGE * _PAGE)
        self._parts = {0: Regions(self.kept), self.kept: Regions(arena.size - self.kept)}
        """Free blocks before and after the end of the kept bytes, by where each part starts."""
        self._blocks: dict[int, _Block] = {}
        """Blocks in use, by their offset in the arena: a reference that nothing keeps would not be called back."""
        self._dropped: deque[_Block] = deque()
        """Blocks whose last view is gone: callbacks may run anywhere, so they take no lock."""

    def allocate(self, nbytes: int) -> memoryview:
        """A block, free again when the last view of it is gone. Raises Overloaded if none is large enough."""
        return self.placed(nbytes)[1]

    def placed(self, nbytes: int) -> tuple[int, memoryview]:
        """As `allocate`; the block's offset in the arena, and the block."""
        self._collect()
        size = max(1, -(-nbytes // _PAGE)) * _PAGE
        for start, part in self._parts.items():
            if region := part.take(size):
                offset = start + region.offset
                array = self.arena.array(offset, nbytes)
                block = self._blocks[offset] = _Block(array, self._dropped.append)
                block.start, block.region = start, region
                return offset, array.data
        raise Overloaded("the shared memory of the server's processes is full", reason="bytes", retry_seconds=1.0)

    def is_kept(self, address: int, nbytes: int) -> bool:
        """Whether bytes at an address lie among the first `kept` ones, which CUDA has pinned."""
        return self.arena.address <= address <= self.arena.address + self.kept - nbytes

    @property
    def free(self) -> int:
        """Bytes that no block holds."""
        self._collect()
        return sum(part.free for part in self._parts.values())

    def _collect(self) -> None:
        with suppress(IndexError):
            while True:
                block = self._dropped.popleft()
                start, region = block.start, block.region
                del self._blocks[start + region.offset]
                if start == self.kept:
                    self.arena.discard(start + region.offset, start + region.end)
                self._parts[start].give_back(region)
