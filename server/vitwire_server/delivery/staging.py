"""Host memory that rows are copied to if they are in memory that NIXL does not know."""

import mmap
from typing import Protocol

import numpy as np

from vitwire.agents import Memory
from vitwire.regions import Region, Regions
from vitwire_server.core.delivery import Rows


class Source(Protocol):
    """Registered memory that a transfer reads."""

    memory: Memory

    def release(self) -> None: ...


class Direct:
    """Rows that are in registered memory."""

    def __init__(self, rows: Rows) -> None:
        self.memory = memory_of(rows)
        self._rows = rows

    def release(self) -> None:
        """Give the rows back to their owner."""
        self._rows.release()


class _Copy:
    """A copy of rows."""

    def __init__(self, memory: Memory, region: Region, regions: Regions) -> None:
        self.memory = memory
        self._region = region
        self._regions = regions

    def release(self) -> None:
        """Give the room back."""
        self._regions.give_back(self._region)


class Staging:
    """A bounded pool of host memory, touched only as far as it is used."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = mmap.mmap(-1, nbytes)
        self._bytes = np.frombuffer(self._buffer, np.uint8)
        self._regions = Regions(nbytes)
        self.memory = Memory(self._bytes.ctypes.data, nbytes)

    def copied(self, rows: Rows) -> Source | None:
        """A copy of rows on the host, which are released; None while there is no room."""
        region = self._regions.take(rows.nbytes)
        if region is None:
            return None
        memory = self.memory.part(region.offset, rows.nbytes)
        target = self._bytes[region.offset : region.offset + rows.nbytes]
        np.copyto(target, _view(memory_of(rows)))  # without the interpreter's lock
        rows.release()
        return _Copy(memory, region, self._regions)


def memory_of(rows: Rows) -> Memory:
    """Where rows are."""
    return Memory(rows.address, rows.nbytes, rows.device)


def _view(memory: Memory) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    interface = {"data": (memory.address, True), "shape": (memory.nbytes,), "typestr": "|u1", "version": 3}
    return np.asarray(type("_Range", (), {"__array_interface__": interface})())
