"""Shared memory: blocks never overlap, come back when the last view is gone, and join again."""

import os
import random
from itertools import pairwise

import numpy as np
import pytest

from vitwire_server.core.errors import Overloaded
from vitwire_server.sessions.arena import Arena, ArenaMemory

PAGE = 4096


@pytest.fixture
def memory() -> ArenaMemory:
    return ArenaMemory(Arena.create(64 * PAGE), kept=16 * PAGE)


def start_of(memory: ArenaMemory, block: memoryview) -> int:
    offset = memory.arena.offset_of(block)
    assert offset is not None
    return offset


def resident(arena: Arena) -> int:
    """Bytes of the arena that take memory."""
    return os.fstat(arena.descriptor).st_blocks * 512


@pytest.mark.parametrize("seed", range(4))
def test_random_blocks_against_a_model(memory: ArenaMemory, seed: int) -> None:
    rng, held = random.Random(seed), dict[int, memoryview]()
    for step in range(600):
        if held and rng.random() < 0.5:
            held.pop(rng.choice(list(held))).release()
        else:
            nbytes = rng.choice([1, PAGE - 1, PAGE, PAGE + 1, rng.randrange(1, 20 * PAGE)])
            if fresh := allocated(memory, nbytes, held):
                np.frombuffer(fresh, np.uint8)[:] = step % 251
                held[step] = fresh
            fresh = None
        assert all((np.frombuffer(block, np.uint8) == number % 251).all() for number, block in held.items())
        assert memory.free == memory.arena.size - sum(map(pages_of, held.values()))
    held.clear()
    assert memory.free == memory.arena.size
    for nbytes in (memory.kept, memory.arena.size - memory.kept):
        held[nbytes] = memory.allocate(nbytes)  # the gaps on both sides of the end of the kept bytes are one again


def allocated(memory: ArenaMemory, nbytes: int, held: dict[int, memoryview]) -> memoryview | None:
    """A block in the first gap that is large enough and on one side of the end of the kept bytes; None without one."""
    taken = sorted((start_of(memory, each), pages_of(each)) for each in held.values())
    gaps, end = [], 0
    for start, size in [*taken, (memory.arena.size, 0)]:
        gaps += [(end, min(start, memory.kept)), (max(end, memory.kept), start)]
        end = start + size
    fitting = [start for start, stop in gaps if stop - start >= nbytes]
    if not fitting:
        with pytest.raises(Overloaded, match="is full"):
            memory.allocate(nbytes)
        return None
    block = memory.allocate(nbytes)
    assert (start_of(memory, block), len(block), block.readonly) == (fitting[0], nbytes, False)
    return block


def pages_of(block: memoryview) -> int:
    """Bytes of the pages that a block takes."""
    return -(-len(block) // PAGE) * PAGE


def test_a_view_of_a_block_keeps_it(memory: ArenaMemory) -> None:
    block = memory.allocate(3 * PAGE)
    part = np.frombuffer(block, np.uint8)[PAGE : PAGE + 10]
    del block
    assert memory.free == memory.arena.size - 3 * PAGE
    del part
    assert memory.free == memory.arena.size


def test_neighbours_join_in_any_order(memory: ArenaMemory) -> None:
    blocks = {number: memory.allocate(16 * PAGE) for number in range(4)}
    assert all(b - a == 16 * PAGE for a, b in pairwise(start_of(memory, each) for each in blocks.values()))
    with pytest.raises(Overloaded):
        memory.allocate(1)
    for number in (2, 0, 1):
        del blocks[number]
    joined = memory.allocate(32 * PAGE)
    assert (start_of(memory, joined), start_of(memory, memory.allocate(16 * PAGE))) == (16 * PAGE, 0)


def test_pages_beyond_what_is_kept_return_to_the_system(memory: ArenaMemory) -> None:
    blocks = [memory.allocate(16 * PAGE) for _ in range(2)]
    for block in blocks:
        np.frombuffer(block, np.uint8)[:] = 1
    assert resident(memory.arena) == 32 * PAGE
    del block
    blocks.clear()
    assert memory.free == memory.arena.size
    assert resident(memory.arena) == 16 * PAGE
    memory.arena.touch(8 * PAGE)
    assert resident(memory.arena) == 16 * PAGE


def test_two_mappings_are_the_same_memory(memory: ArenaMemory) -> None:
    block = memory.allocate(100)
    other = Arena(os.dup(memory.arena.descriptor))
    other.array(start_of(memory, block), 100)[:] = range(100)
    assert bytes(block) == bytes(range(100))
    assert bytes(other.view(start_of(memory, block), 100)) == bytes(range(100))
    os.close(other.descriptor)


def test_bytes_elsewhere_are_not_in_the_arena(memory: ArenaMemory) -> None:
    assert memory.arena.offset_of(memoryview(bytes(10))) is None
    assert memory.arena.offset_of(memoryview(bytearray(2 * memory.arena.size))) is None
