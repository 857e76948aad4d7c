"""Memory that receives the pixels of items."""

from typing import Protocol

import numpy as np


class Memory(Protocol):
    """Where pixels are received."""

    def allocate(self, nbytes: int) -> memoryview:
        """Writable memory, which is free again when the last view of it is gone. Raises Overloaded."""
        ...


class PrivateMemory:
    """Memory of this process."""

    def allocate(self, nbytes: int) -> memoryview:
        """See Memory."""
        return np.empty(nbytes, np.uint8).data
