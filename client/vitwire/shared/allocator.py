"""Tuning of glibc's allocator for large, short-lived buffers."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_SETTINGS = ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_ARENA_MAX, 1))


def tune() -> bool:
    """Keep large freed buffers in the process. Returns whether it took effect; only glibc supports it.

    By default glibc maps and unmaps each large buffer, and the page faults then cost more than gRPC itself. Useful in
    processes that send or receive megabytes repeatedly. Call it once, before threads are started; it is not called on
    import, as it changes the whole process. Freed memory stays with the process: see `trim`.
    """
    libc = _glibc()
    if libc is None:
        return False
    results = [libc.mallopt(parameter, value) for parameter, value in _SETTINGS]
    return all(result == 1 for result in results)


def trim() -> bool:
    """Return freed memory to the system; call it when idle. Returns whether there was any."""
    libc = _glibc()
    return libc is not None and libc.malloc_trim(0) == 1


def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL(None)
    except (OSError, TypeError):  # on Windows
        return None
    return libc if hasattr(libc, "gnu_get_libc_version") else None
