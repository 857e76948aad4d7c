"""Memory of the host that the server shares with one sender, and copies rows to."""

import fcntl
import mmap
import os
from weakref import finalize

import numpy as np

from vitwire.shared.regions import Region, Regions
from vitwire_server.core.delivery import Rows


class Staging:
    """A bounded pool of memory, touched only as far as it is used."""

    def __init__(self, nbytes: int) -> None:
        """Raises OSError."""
        self.descriptor = os.memfd_create("vitwire-delivery", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.close = finalize(self, os.close, self.descriptor)
        """Closes the file; the memory is freed once the sender has ended."""
        os.ftruncate(self.descriptor, nbytes)
        # A sender that was taken over cannot make writes of the server fail.
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._map = mmap.mmap(self.descriptor, nbytes)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._regions = Regions(nbytes)

    def copied(self, rows: Rows) -> Region | None:
        """Copy rows on the host; returns the region, or None while there is no room."""
        region = self._regions.take(rows.nbytes)
        if region:
            np.copyto(self._bytes[region.offset : region.offset + rows.nbytes], _view(rows))  # without the GIL
        return region

    def give_back(self, region: Region) -> None:
        """The copy is not read any more."""
        self._regions.give_back(region)


def _view(rows: Rows) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    interface = {"data": (rows.address, True), "shape": (rows.nbytes,), "typestr": "|u1", "version": 3}
    return np.asarray(type("_Range", (), {"__array_interface__": interface})())
