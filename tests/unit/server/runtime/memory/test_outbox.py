"""Rows that stay in the outbox. tests/gpu runs the same on a GPU."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from reference import Array
from rigs import Rig
from vitwire_server.core.errors import InvalidTensors
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import DType, Embedding, Item, Pixels
from vitwire_server.runtime.memory.outbox import Outbox

PAGE = 4096
GRIDS = (Grid(1, 8, 10), Grid(2, 4, 6), Grid(1, 12, 6))


@pytest.fixture(scope="module")
def bare(checkpoints: Callable[[str], Path], device: torch.device) -> Rig:
    return Rig.of(checkpoints("qwen3_vl"), torch.bfloat16, device)


@pytest.fixture
def rig(bare: Rig, device: torch.device) -> Iterator[Rig]:
    """With an outbox that keeps what is stored."""
    bare.engine._outbox = Outbox(device, 1 << 20)
    bare.engine._outbox.keeps = True
    yield bare
    bare.engine._outbox = None


def outbox_of(rig: Rig) -> Outbox:
    assert rig.engine._outbox
    return rig.engine._outbox


def embeddings(rig: Rig, items: list[Item], *, eager: bool = False) -> list[Embedding]:
    collected = rig.engine.launch(items, None if eager else rig.holding(items)).collect()
    assert all(isinstance(each, Embedding) for each in collected.results), collected.results
    return [each for each in collected.results if isinstance(each, Embedding)]


def array(data: memoryview, embedding: Embedding) -> Array:
    return np.frombuffer(data, np.float32).reshape(embedding.shape)


@pytest.mark.parametrize("eager", [False, True])
def test_rows_that_are_stored_do_not_go_to_the_host(rig: Rig, eager: bool) -> None:
    items = rig.items(GRIDS)
    stored = [replace(each, store_only=index != 1) for index, each in enumerate(items)]
    outbox_of(rig).keeps = False
    expected = embeddings(rig, stored, eager=eager)
    assert all(each.is_on_host and each.device is None for each in expected)
    outbox_of(rig).keeps = True
    found = embeddings(rig, stored, eager=eager)
    assert [each.is_on_host for each in found] == [False, True, False]
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.nbytes, one.kept) == (other.shape, other.nbytes, other.kept)
        assert one.is_on_host == bool(one.data)
        rows = one.device.download() if one.device else one.data
        np.testing.assert_array_equal(array(rows, one), array(other.data, other))


def test_pruned_rows_are_stored(rig: Rig) -> None:
    (clip,) = rig.items([Grid(4, 4, 6)])
    clip = replace(clip, keep_ratio=0.5)
    (expected,) = embeddings(rig, [clip])
    (found,) = embeddings(rig, [replace(clip, store_only=True)])
    assert found.device
    assert found.kept == expected.kept
    np.testing.assert_array_equal(array(found.device.download(), found), array(expected.data, expected))


def test_rows_without_room_go_to_the_host(rig: Rig, device: torch.device) -> None:
    items = [replace(each, store_only=True) for each in rig.items(GRIDS)]
    most = -(-max(each.nbytes for each in embeddings(rig, items)) // PAGE) * PAGE
    rig.engine._outbox = Outbox(device, most)
    rig.engine._outbox.keeps = True
    first = embeddings(rig, items)
    assert [each.is_on_host for each in first] == [False, True, True]
    (second,) = embeddings(rig, items[1:2])
    assert second.is_on_host
    del first
    (third,) = embeddings(rig, items[:1])
    assert third.device


def test_items_that_fail_hold_no_room(rig: Rig, device: torch.device) -> None:
    (item,) = rig.items(GRIDS[:1])
    rig.engine._outbox = Outbox(device, -(-item.rows_nbytes(rig.tower.geometry.width) // PAGE) * PAGE)
    rig.engine._outbox.keeps = True
    nan = np.full(item.pixels.shape, np.nan, np.float32)
    bad = replace(item, pixels=Pixels(nan.tobytes(), DType.FLOAT32, item.pixels.shape), store_only=True)
    for _ in range(3):
        (result,) = rig.engine.launch([bad], rig.holding([bad])).collect().results
        assert isinstance(result, InvalidTensors)
    (found,) = embeddings(rig, [replace(item, store_only=True)])
    assert found.device


def test_room_is_free_again_once_nothing_refers_to_rows(device: torch.device) -> None:
    outbox = Outbox(device, 2 * PAGE)
    source = torch.arange(PAGE, device=device).to(torch.uint8)
    for _ in range(3):
        first, second = outbox.copies([source, source + 1])
        assert first
        assert second
        assert (first.taken, first.nbytes, second.address - first.address) == (PAGE, PAGE, PAGE)
        assert outbox.copied(source) is None
        assert bytes(second.download()) == bytes((source + 1).cpu().numpy())
        del first
        third = outbox.copied(source + 2)
        assert third
        assert bytes(third.download()) == bytes((source + 2).cpu().numpy())
        del second, third
