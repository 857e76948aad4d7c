"""Memory of results: reused once released, never while anything refers to it."""

import gc
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from vitwire._delivery.memory import Pool, empty

UNIT = 4 << 20
"""The smallest array whose memory is pooled."""


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<u2"])
def test_an_array_is_as_from_numpy(dtype: str) -> None:
    array = empty((2048, 2048), dtype, Pool())
    assert (array.shape, array.dtype, array.flags.c_contiguous) == ((2048, 2048), np.dtype(dtype), True)
    array[...] = 7
    assert (array == 7).all()


def test_memory_is_reused_once_every_view_is_gone() -> None:
    pool = Pool()
    array = empty((UNIT,), "u1", pool)
    first, view = address(array), memoryview(array[5:10].reshape(5, 1))
    del array
    other = empty((UNIT,), "u1", pool)
    assert address(other) != first
    del view
    gc.collect()
    assert address(empty((UNIT,), "u1", pool)) == first


def test_tensors_keep_the_memory() -> None:
    torch = pytest.importorskip("torch")
    pool = Pool()
    array = empty((UNIT,), "u1", pool)
    first, tensors = address(array), [torch.from_numpy(array), torch.from_dlpack(array)]
    del array
    for _ in range(2):
        gc.collect()
        assert address(empty((UNIT,), "u1", pool)) != first
        tensors.pop()
    gc.collect()
    assert any(buffer.ctypes.data == first for buffer in pool._free)


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    pool = Pool(kept_bytes=5 * UNIT)
    arrays = [empty((2 * UNIT,), "u1", pool) for _ in range(4)]
    addresses = [address(each) for each in arrays]
    while arrays:
        arrays.pop(0)
    assert [buffer.ctypes.data for buffer in pool._free] == addresses[2:]


def test_a_buffer_of_another_size_is_not_used() -> None:
    pool = Pool()
    del_me = empty((4 * UNIT,), "u1", pool)
    first = address(del_me)
    del del_me
    assert address(empty((UNIT,), "u1", pool)) != first
    assert address(empty((4 * UNIT - 5,), "u1", pool)) == first


def test_small_arrays_are_left_to_numpy() -> None:
    pool = Pool()
    assert empty((0, 5), "<f4", pool).shape == (0, 5)
    del_me = empty((100,), "<f4", pool)
    del del_me
    assert not pool._free


def test_many_threads_never_share_memory() -> None:
    pool = Pool(kept_bytes=2 * UNIT)

    def fill(value: int) -> bool:
        for _ in range(20):
            array = empty((UNIT,), "u1", pool)
            array[...] = value
            if not (array == value).all():
                return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(fill, range(4)))


FRESH_PAGES = """
import ctypes, resource, sys
from vitwire._delivery import memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
if sys.argv[1] == "result":
    memory.empty((5 << 20,), "u1")
MESSAGE = 3 << 20
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffers = [libc.malloc(MESSAGE) for _ in range(4)]
    for each in buffers:
        ctypes.memset(each, 1, MESSAGE)
    for each in buffers:
        libc.free(each)
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(pages)
"""


def fresh_pages(after: str) -> int:
    """Pages that became the process's for messages as large as those freed just before, after a large result or not."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", FRESH_PAGES, after]
    return int(subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's allocator")
def test_messages_reuse_freed_memory_once_there_was_a_large_result() -> None:
    assert fresh_pages("nothing") > 20 * fresh_pages("result")
