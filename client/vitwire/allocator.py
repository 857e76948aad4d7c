"""Memory of large messages: glibc's allocator, set for buffers that come and go by the megabyte."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_SETTINGS = ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_ARENA_MAX, 1))


def tune() -> bool:
    """Keep large freed buffers in the process. Returns whether it took effect, which it does on glibc only.

    By default glibc maps every large buffer anew and gives it back after each message, and the page faults
    of the next one then cost more than gRPC itself does. Meant for processes that send or receive megabytes
    again and again; to be called once, early, before threads are started. It is never called on import,
    since the allocator belongs to the whole process. The price is that freed memory stays with the process:
    see `trim`.
    """
    libc = _glibc()
    if libc is None:
        return False
    results = [libc.mallopt(parameter, value) for parameter, value in _SETTINGS]
    return all(result == 1 for result in results)


def trim() -> bool:
    """Give freed memory back to the system, when idle. Returns whether there was any."""
    libc = _glibc()
    return libc is not None and libc.malloc_trim(0) == 1


def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no handle of the process itself
        return None
    return libc if hasattr(libc, "gnu_get_libc_version") else None
