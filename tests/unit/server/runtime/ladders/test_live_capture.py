"""Captures between batches, on a real engine. tests/gpu runs the same on a GPU."""

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rigs import RIGHT, Rig, Yardstick, rows_of
from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.grids import Grid
from vitwire_server.core.runner import Running
from vitwire_server.runtime.graphs import Graph, Recorder, SimulatedRecorder
from vitwire_server.runtime.ladders.live_capture import CaptureFailed, LiveCapture

MODEL_TYPE = "qwen3_vl"
BF16 = torch.bfloat16
GRIDS = (Grid(1, 8, 10), Grid(2, 4, 6), Grid(1, 2, 2), Grid(1, 12, 6))
TOKENS = sum(grid.patches for grid in GRIDS) // 4
BOUND = 64 << 20
SEGMENT = 2 << 20
"""What torch's allocator takes for small tensors at a time: metadata of other sizes may begin another one."""


@pytest.fixture
def rig(checkpoints: Callable[[str], Path], device: torch.device) -> Rig:
    return Rig.of(checkpoints(MODEL_TYPE), BF16, device)


@pytest.fixture(scope="module")
def yardstick(yardsticks: Callable[[str, torch.dtype], Yardstick]) -> Yardstick:
    return yardsticks(MODEL_TYPE, BF16)


def live(rig: Rig, recorder: Recorder | None = None, bound: int = BOUND) -> LiveCapture:
    return LiveCapture(
        rig.tower, rig.engine, rig.graphs, rig.streams, recorder or rig.recorder, lambda ladder: ladder, bound
    )


def budget(tokens: int) -> Budget:
    return Budget(tokens, 4 * tokens, max_items=min(tokens, 8), max_segments=8)


def finish(parts: Iterator[None]) -> None:
    for _ in parts:
        pass


def wrong(rig: Rig, yardstick: Yardstick, running: Running, seed: int) -> bool:
    return max(yardstick.errors(rig, rows_of(running.collect()), GRIDS, seed=seed)) >= RIGHT


def test_batches_run_on_between_the_parts_of_a_capture(rig: Rig, yardstick: Yardstick) -> None:
    """One is in flight during each part, on the budget whose static buffers the capture shares."""
    own, new = rig.holding(rig.items(GRIDS)), budget(TOKENS)
    running = [rig.engine.launch(rig.items(GRIDS), own)]
    for _ in live(rig).capture(new):
        running.append(rig.engine.launch(rig.items(GRIDS, seed=len(running)), own))
    for on in (new, own, new):
        running.append(rig.engine.launch(rig.items(GRIDS, seed=len(running)), on))
    assert not any(wrong(rig, yardstick, each, seed) for seed, each in enumerate(running))


def test_a_failed_capture_leaves_the_graphs_as_they_were(rig: Rig, yardstick: Yardstick) -> None:
    class Failing(SimulatedRecorder):
        left = 1

        def capture(self, forward: Callable[[], None]) -> Callable[[], None]:
            if not self.left:
                raise torch.OutOfMemoryError("no room\nat line 3")
            self.left -= 1
            return rig.recorder.capture(forward)

    before = rig.graphs.ladder
    capture = live(rig, Failing())
    finish(capture.capture(budget(100)))
    with pytest.raises(CaptureFailed, match=r"^budget of 90 tokens: no room$"):
        finish(capture.capture(budget(90)))
    capture.give_up(before)
    assert rig.graphs.ladder == before
    assert max(yardstick.errors(rig, rig.run(rig.items(GRIDS)), GRIDS)) < RIGHT


def test_a_budget_larger_than_the_static_buffers_is_refused(rig: Rig) -> None:
    with pytest.raises(CaptureFailed, match="larger than the static buffers"):
        finish(live(rig).capture(budget(321)))


def test_memory_is_flat_over_twenty_changes(rig: Rig, yardstick: Yardstick) -> None:
    capture, device, first = live(rig), rig.tower.device, rig.graphs.ladder
    graphs: list[weakref.ref[Graph]] = []
    reserved = []
    for change in range(20):
        sizes = [budget(size) for size in (20 + change, TOKENS + change, 100 + 2 * change)]
        ladder = Ladder((*sizes, first.budgets[-1]))
        for each in sizes:
            finish(capture.capture(each))
            graphs.append(weakref.ref(rig.graphs[each]))
        capture.keep(ladder)
        assert rig.graphs.ladder == ladder
        if change % 7 == 0:
            items = rig.items(GRIDS, seed=change)
            assert not wrong(rig, yardstick, rig.engine.launch(items, rig.holding(items)), change)
        if device.type == "cuda":
            reserved.append(torch.cuda.memory_reserved(device))
    gc.collect()
    assert sum(graph() is not None for graph in graphs) == 3
    assert not reserved or reserved[-1] <= reserved[10] + SEGMENT, reserved
