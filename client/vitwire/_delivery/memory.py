"""Memory of results, reused once they are released.

The first touch of fresh memory costs more than copying rows into it, and glibc returns buffers above 32 MiB, and often
smaller ones, to the system when they are freed. Reuse saves a fifth of the CPU time of receiving 33.6 MB.
`allocator.tune` avoids fresh memory in a whole process; without it, `_keep_freed` avoids most of it.
"""

import math
import threading
from functools import cache

import numpy as np
import numpy.typing as npt

_SMALLEST = 4 << 20
"""Smaller arrays are left to numpy, as the pool gains nothing for them."""
_KEPT_BYTES = 128 << 20
"""Maximum free memory kept for later results."""
_MOST_SPARE = 1.25
"""Largest buffer for an array, by its size."""
_LARGEST_KEPT = (32 << 20) - (64 << 10)
"""Bytes of the largest buffer, with its header, that glibc learns from."""
Bytes = npt.NDArray[np.uint8]


@cache
def _keep_freed() -> None:
    """Free one untouched buffer: glibc then keeps freed buffers of up to its size, twice as many bytes at a time.

    glibc learns from the sizes that a process frees. gRPC allocates each message of rows anew: without this, receiving
    33.6 MB touched thousands of fresh pages and took half as much processor time again
    (docs/performance/service.md).
    """
    np.empty(_LARGEST_KEPT, np.uint8)


class Pool:
    """Free buffers. Thread-safe; its lock is reentrant, as garbage collection may release a buffer at any point."""

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._lock = threading.RLock()
        self._free: list[Bytes] = []
        """The most recently released last."""

    def take(self, nbytes: int) -> Bytes:
        """A buffer of at least `nbytes`."""
        with self._lock:
            for position in range(len(self._free) - 1, -1, -1):
                if nbytes <= self._free[position].nbytes <= nbytes * _MOST_SPARE:
                    return self._free.pop(position)
        _keep_freed()
        return np.empty(nbytes, np.uint8)

    def release(self, buffer: Bytes) -> None:
        """Keep a buffer that nothing refers to any more, in place of those released longest ago."""
        with self._lock:
            self._free.append(buffer)
            while sum(each.nbytes for each in self._free) > self._kept_bytes:
                self._free.pop(0)


class _Lease:
    """Owns a buffer for one array: the base of that array and of all its views. Releases it when they are gone."""

    def __init__(self, pool: Pool, nbytes: int, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> None:
        self._pool = pool
        self._buffer = pool.take(nbytes)
        self.__array_interface__ = {
            "version": 3,
            "shape": shape,
            "typestr": dtype.str,
            "data": (self._buffer.ctypes.data, False),
        }

    def __del__(self) -> None:
        self._pool.release(self._buffer)


_POOL = Pool()


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike, pool: Pool = _POOL) -> npt.NDArray[np.generic]:
    """As `numpy.empty`; the memory of a large array comes from the pool and returns to it."""
    kind = np.dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    if nbytes < _SMALLEST:
        return np.empty(shape, kind)
    return np.asarray(_Lease(pool, nbytes, shape, kind))
