"""Copies between a device and memory that processes share, part of which is pinned. Needs CUDA."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from vitwire_server.core.items import DType, Pixels
from vitwire_server.runtime.memory.streams import CudaStreams, pin
from vitwire_server.sessions.arena import Arena, ArenaMemory

MIB = 1 << 20


@pytest.fixture(autouse=True)
def needs_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs CUDA")


@pytest.fixture
def pinned() -> Iterator[Callable[[int, int], ArenaMemory]]:
    """Makes memory whose first bytes are pinned during a test: later mappings may get the same addresses."""
    views: list[memoryview] = []

    def make(size: int, kept: int) -> ArenaMemory:
        memory = ArenaMemory(Arena.create(size), kept)
        memory.arena.touch(memory.kept)
        views.append(memory.arena.view(0, memory.kept))
        pin(views[-1])
        return memory

    yield make
    torch.cuda.synchronize()
    for view in views:
        torch.cuda.cudart().cudaHostUnregister(np.frombuffer(view, np.uint8).ctypes.data)


def test_memory_that_cannot_be_pinned_is_used_all_the_same(
    device: torch.device, pinned: Callable[[int, int], ArenaMemory], caplog: pytest.LogCaptureFixture
) -> None:
    memory = pinned(32 * MIB, MIB)
    pin(memory.arena.view(0, memory.kept))
    assert "could not be pinned" in caplog.text
    block = memory.allocate(MIB // 2)
    block[:] = bytes([7]) * len(block)
    (uploaded,) = CudaStreams(device, memory).upload([[Pixels(block, DType.UINT8, (len(block),))]])
    torch.cuda.synchronize(device)
    assert bool((uploaded == 7).all())


def test_blocks_around_the_end_of_the_pinned_part(
    device: torch.device, pinned: Callable[[int, int], ArenaMemory]
) -> None:
    memory = pinned(32 * MIB, MIB)
    streams = CudaStreams(device, memory)
    held = []
    for value in range(6):
        block = memory.allocate(3 * MIB // 4)
        block[:] = bytes([value]) * len(block)
        (uploaded,) = streams.upload([[Pixels(block, DType.UINT8, (len(block),))]])
        with streams.computing():
            rows = uploaded.view(-1, 1024) + 1
        download = streams.download([rows], [])
        download.wait()
        assert bytes(download.rows[0]) == bytes([value + 1]) * len(block)
        held += [block, download]


@pytest.mark.parametrize("shared", [True, False])
def test_several_items_of_a_batch(
    device: torch.device, pinned: Callable[[int, int], ArenaMemory], *, shared: bool
) -> None:
    memory = pinned(32 * MIB, 16 * MIB) if shared else None
    streams = CudaStreams(device, memory)
    groups = []
    for sizes in ((1000, 300_000), (7,), (4096, 1, 65_537)):
        blocks = [memory.allocate(size) if memory else memoryview(bytearray(size)) for size in sizes]
        for number, block in enumerate(blocks):
            block[:] = bytes([10 * len(sizes) + number]) * len(block)
        groups.append([Pixels(block, DType.UINT8, (len(block),)) for block in blocks])
    uploaded = streams.upload(groups)
    assert [len(each) for each in uploaded] == [sum(one.nbytes for one in group) for group in groups]
    with streams.computing():
        rows = [
            part + 1
            for each, group in zip(uploaded, groups, strict=True)
            for part in each.split([one.nbytes for one in group])
        ]
        checks = [torch.ones(3, dtype=torch.bool, device=device), torch.empty(0, dtype=torch.int64, device=device)]
    download = streams.download(rows, checks)
    download.wait()
    finite, none = download.checks
    assert bool(finite.all())
    assert not len(none)
    for copy, one in zip(download.rows, [one for group in groups for one in group], strict=True):
        assert bytes(copy) == bytes([one.data[0] + 1]) * one.nbytes
