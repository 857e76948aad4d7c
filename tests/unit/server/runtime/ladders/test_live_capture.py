"""Captures between batches, on a real engine. tests/gpu runs the same on a GPU."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from rigs import RIGHT, Rig, Yardstick, rows_of
from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.grids import Grid
from vitwire_server.core.runner import Running
from vitwire_server.runtime.graph_recording import is_recording
from vitwire_server.runtime.ladders.live_capture import LONGEST_REPLAY, CaptureFailed, LiveCapture

MODEL_TYPE = "qwen3_vl"
BF16 = torch.bfloat16
GRIDS = (Grid(1, 8, 10), Grid(2, 4, 6), Grid(1, 2, 2), Grid(1, 12, 6))
TOKENS = sum(grid.patches for grid in GRIDS) // 4
BOUND = 64 << 20
WARM_UPS = 1
"""Forwards before a capture."""
SECONDS = 1e-3
"""Of a forward of the device."""
SEGMENT = 2 << 20
"""What torch's allocator takes for small tensors at a time: metadata of other sizes may begin another one."""


@pytest.fixture
def rig(checkpoints: Callable[[str], Path], device: torch.device) -> Rig:
    return Rig.of(checkpoints(MODEL_TYPE), BF16, device)


@pytest.fixture(scope="module")
def yardstick(yardsticks: Callable[[str, torch.dtype], Yardstick]) -> Yardstick:
    return yardsticks(MODEL_TYPE, BF16)


def live(rig: Rig) -> LiveCapture:
    return LiveCapture(rig.tower, rig.graphs, rig.streams, rig.recorder, lambda ladder: ladder, BOUND)


def budget(tokens: int) -> Budget:
    return Budget(tokens, 4 * tokens, max_items=min(tokens, 8), max_segments=8)


class Breaking:
    """Lets the last layer of a tower fail while it is captured, and raises no error elsewhere."""

    def __init__(self, rig: Rig, error: Exception) -> None:
        self._error = error
        self._recorded = 0
        self._hook = rig.tower.blocks[-1].register_forward_pre_hook(self._break)

    def _break(self, *_: object) -> None:
        self._recorded += is_recording()
        if self._recorded == WARM_UPS + 1:
            raise self._error

    def end(self) -> None:
        self._hook.remove()


def wrong(rig: Rig, yardstick: Yardstick, running: Running, seed: int) -> bool:
    return max(yardstick.errors(rig, rows_of(running.collect()), GRIDS, seed=seed)) >= RIGHT


def test_batches_in_flight_share_the_static_buffers_with_a_capture(rig: Rig, yardstick: Yardstick) -> None:
    """One on a graph, which is launched before the capture, and one eagerly; then on the new graph and the old one."""
    own, new = rig.holding(rig.items(GRIDS)), budget(TOKENS)
    running = [rig.engine.launch(rig.items(GRIDS, seed=seed), on) for seed, on in enumerate((own, None))]
    live(rig).capture(new)
    for on in (new, own, None, new):
        running.append(rig.engine.launch(rig.items(GRIDS, seed=len(running)), on))
    assert not any(wrong(rig, yardstick, each, seed) for seed, each in enumerate(running))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("no room\nat line 3"), r"^budget of 90 tokens: no room$"),
        (KeyError("of a compiler"), r"^budget of 90 tokens: 'of a compiler'$"),
    ],
)
def test_a_capture_that_fails_leaves_the_graphs_as_they_were(
    error: Exception, message: str, rig: Rig, yardstick: Yardstick
) -> None:
    before, capture = rig.graphs.ladder, live(rig)
    capture.capture(budget(100))
    breaking = Breaking(rig, error)
    with pytest.raises(CaptureFailed, match=message):
        capture.capture(budget(90))
    breaking.end()
    capture.give_up(before)
    assert rig.graphs.ladder == before
    assert max(yardstick.errors(rig, rig.run(rig.items(GRIDS)), GRIDS)) < RIGHT
    capture.capture(budget(TOKENS))
    assert not wrong(rig, yardstick, rig.engine.launch(rig.items(GRIDS), budget(TOKENS)), 0)


@pytest.mark.parametrize("fails", [True, False])
def test_memory_that_a_capture_took_is_counted(rig: Rig, monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
    """Of a forward that takes 10 bytes in each layer that is recorded, its warm-up excepted."""
    reserved, recorded, layers = [0], [0], len(rig.tower.blocks)

    def grow(*_: object) -> None:
        reserved[0] += 10 * (is_recording() and recorded[0] >= layers)
        recorded[0] += is_recording()

    hooks = [block.register_forward_hook(grow) for block in rig.tower.blocks]
    monkeypatch.setattr(LiveCapture, "reserved", lambda _: reserved[0])
    capture = live(rig)
    breaking = Breaking(rig, RuntimeError("injected")) if fails else None
    with pytest.raises(CaptureFailed) if fails else nullcontext():
        capture.capture(budget(100))
    assert capture.grown == reserved[0] == 10 * (layers - fails)
    if breaking:
        breaking.end()
    for hook in hooks:
        hook.remove()


def test_replays_are_timed_on_a_device(rig: Rig, yardstick: Yardstick) -> None:
    capture, new = live(rig), budget(TOKENS)
    capture.capture(new)
    running = rig.engine.launch(rig.items(GRIDS), new)
    taken = capture.timed(new, new, SECONDS)
    assert not wrong(rig, yardstick, running, 0)
    assert taken is None if rig.tower.device.type == "cpu" else 0 < (taken or 0) < 1
    assert capture.timed(new, new, 2 * LONGEST_REPLAY) is None


def test_a_budget_larger_than_the_static_buffers_is_refused(rig: Rig) -> None:
    with pytest.raises(CaptureFailed, match="larger than the static buffers"):
        live(rig).capture(budget(321))


@pytest.fixture
def no_collections() -> Iterator[None]:
    """As in a server for what it made at the start: `exempt_loaded`."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
def test_memory_is_flat_over_twenty_changes(rig: Rig, yardstick: Yardstick) -> None:
    capture, device, first = live(rig), rig.tower.device, rig.graphs.ladder
    graphs: list[weakref.ref[Any]] = [weakref.ref(rig.graphs[each]) for each in first]
    reserved = []
    for change in range(20):
        sizes = [budget(size) for size in (20 + change, TOKENS + change, 100 + 2 * change)]
        ladder = Ladder((*sizes, first.budgets[-1]))
        for each in sizes:
            capture.capture(each)
            graphs.append(weakref.ref(rig.graphs[each]))
        rig.graphs.keep(ladder)
        assert rig.graphs.ladder == ladder
        if change % 7 == 0:
            items = rig.items(GRIDS, seed=change)
            assert not wrong(rig, yardstick, rig.engine.launch(items, rig.holding(items)), change)
        if device.type == "cuda":
            reserved.append(torch.cuda.memory_reserved(device))
    assert sum(graph() is not None for graph in graphs) == len(rig.graphs) == 4
    assert not reserved or reserved[-1] <= reserved[10] + SEGMENT, reserved
