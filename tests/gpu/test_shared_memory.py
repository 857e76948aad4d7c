"""Copies between a device and memory that processes share, part of which is pinned. Needs CUDA."""

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


def pinned(size: int, kept: int) -> ArenaMemory:
    memory = ArenaMemory(Arena.create(size), kept)
    memory.arena.touch(memory.kept)
    pin(memory.arena.view(0, memory.kept))
    return memory


def test_blocks_around_the_end_of_the_pinned_part(device: torch.device) -> None:
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
        assert bool((download.tensors[0] == value + 1).all())
        held += [block, download]
