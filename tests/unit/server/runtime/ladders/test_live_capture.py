"""Captures in turns between batches, on a real engine. tests/gpu runs the same on a GPU."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rigs import RIGHT, Rig, Yardstick, rows_of
from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.errors import EncodeFailed
from vitwire_server.core.grids import Grid
from vitwire_server.core.runner import Running
from vitwire_server.fitting.ladders import REPLAYS
from vitwire_server.runtime.ladders import live_capture
from vitwire_server.runtime.ladders.live_capture import CaptureFailed, LiveCapture
from vitwire_server.runtime.recording import is_recording

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


@pytest.fixture(autouse=True)
def a_turn_for_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_capture, "TURN_SECONDS", 0.0)


def live(rig: Rig) -> LiveCapture:
    return LiveCapture(rig.tower, rig.graphs, rig.streams, rig.recorder, lambda ladder: ladder, BOUND)


def budget(tokens: int) -> Budget:
    return Budget(tokens, 4 * tokens, max_items=min(tokens, 8), max_segments=8)


class Given(threading.Semaphore):
    """Counts the turns that the work gets: parts beside it are empty, and of any number."""

    def __init__(self, capture: LiveCapture) -> None:
        super().__init__(0)
        self.count = 0
        capture.turns._given = self

    def release(self, n: int = 1) -> None:
        self.count += n
        super().release(n)


def turns_of(capture: LiveCapture, tokens: int, seconds: float = SECONDS) -> int:
    """The turns that a capture takes: of its forward, of its layers, and the last one with a graph."""
    given = Given(capture)
    finish(capture.capture(budget(tokens), seconds))
    return given.count


def finish(parts: Iterator[None]) -> None:
    for _ in parts:
        pass


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


def fail(*_: object) -> Any:
    raise RuntimeError("injected")


def wrong(rig: Rig, yardstick: Yardstick, running: Running, seed: int) -> bool:
    return max(yardstick.errors(rig, rows_of(running.collect()), GRIDS, seed=seed)) >= RIGHT


def test_batches_run_on_between_the_turns_of_a_capture(rig: Rig, yardstick: Yardstick) -> None:
    """One is in flight during each turn, on the budget whose static buffers the capture shares, or eagerly."""
    own, new = rig.holding(rig.items(GRIDS)), budget(TOKENS)
    running = [rig.engine.launch(rig.items(GRIDS), own)]
    for _ in live(rig).capture(new, SECONDS):
        running.append(rig.engine.launch(rig.items(GRIDS, seed=len(running)), own if len(running) % 2 else None))
    assert len(running) > 2 * len(rig.tower.blocks), "the forward runs twice, a layer in each turn"
    for on in (new, own, new):
        running.append(rig.engine.launch(rig.items(GRIDS, seed=len(running)), on))
    assert not any(wrong(rig, yardstick, each, seed) for seed, each in enumerate(running))


def test_slices_give_the_rows_of_a_whole_graph(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    capture, new, rows = live(rig), budget(TOKENS), []
    for seconds in (600.0, 0.0):
        monkeypatch.setattr(live_capture, "TURN_SECONDS", seconds)
        finish(capture.capture(new, SECONDS))
        rows.append(rows_of(rig.engine.launch(rig.items(GRIDS), new).collect()))
    for one, other in zip(*rows, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_turn_takes_several_layers_if_they_are_short(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_capture, "TURN_SECONDS", 600.0)
    assert turns_of(live(rig), TOKENS) == 3, "forward, capture, graph"


def test_layers_that_take_the_device_long_have_turns_of_their_own(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_capture, "TURN_SECONDS", 600.0)
    turns = turns_of(live(rig), TOKENS, 600.0 * len(rig.tower.blocks))
    assert turns == 3 + len(rig.tower.blocks) - 1


def test_a_forward_may_be_predicted_to_take_no_time(rig: Rig, yardstick: Yardstick) -> None:
    """As if none had room while costs were measured."""
    finish(live(rig).capture(budget(TOKENS), 0.0))
    assert not wrong(rig, yardstick, rig.engine.launch(rig.items(GRIDS), budget(TOKENS)), 0)


def test_a_batch_may_fail_between_the_turns(rig: Rig, yardstick: Yardstick, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, new, failed = rig.engine._forward, budget(TOKENS), 0
    parts = live(rig).capture(new, SECONDS)
    for number, _ in enumerate(parts):
        breaking = rig.tower.blocks[-1].register_forward_pre_hook(fail)
        if number % 2:
            monkeypatch.setattr(rig.engine, "_forward", fail)
        (result,) = rig.engine.launch(rig.items(GRIDS[:1]), None).collect().results
        failed += isinstance(result, EncodeFailed)
        breaking.remove()
        monkeypatch.setattr(rig.engine, "_forward", forward)
    assert failed > 2 * len(rig.tower.blocks)
    assert not wrong(rig, yardstick, rig.engine.launch(rig.items(GRIDS), new), 0)
    assert not wrong(rig, yardstick, rig.engine.launch(rig.items(GRIDS), None), 0)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("no room\nat line 3"), r"^budget of 90 tokens: no room$"),
        (KeyError("of a compiler"), r"^budget of 90 tokens: KeyError\('of a compiler'\)$"),
    ],
)
def test_a_capture_that_fails_in_a_turn_leaves_the_graphs_as_they_were(
    error: Exception, message: str, rig: Rig, yardstick: Yardstick
) -> None:
    before, capture = rig.graphs.ladder, live(rig)
    finish(capture.capture(budget(100), SECONDS))
    breaking = Breaking(rig, error)
    with pytest.raises(CaptureFailed, match=message):
        finish(capture.capture(budget(90), SECONDS))
    breaking.end()
    capture.give_up(before)
    assert rig.graphs.ladder == before
    assert max(yardstick.errors(rig, rig.run(rig.items(GRIDS)), GRIDS)) < RIGHT
    finish(capture.capture(budget(TOKENS), SECONDS))
    assert not wrong(rig, yardstick, rig.engine.launch(rig.items(GRIDS), budget(TOKENS)), 0)


@pytest.mark.parametrize("fails", [True, False])
def test_memory_that_an_unfinished_capture_took_is_counted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """Of a forward that takes 10 bytes in each layer that is captured, while batches take 1,000 after each turn."""
    reserved, recorded, layers = [0], [0], len(rig.tower.blocks)

    def grow(*_: object) -> None:
        if is_recording():
            reserved[0] += 10 * (recorded[0] % (2 * layers) >= layers)
            recorded[0] += 1

    hooks = [block.register_forward_hook(grow) for block in rig.tower.blocks]
    monkeypatch.setattr(LiveCapture, "reserved", lambda _: reserved[0])
    capture = live(rig)
    turns = turns_of(capture, 100)
    assert capture.grown == reserved[0] == 10 * len(hooks)
    breaking = Breaking(rig, RuntimeError("injected")) if fails else None
    parts = capture.capture(budget(90), SECONDS)
    with suppress(CaptureFailed):
        for _ in range(turns - 3):
            next(parts)
            reserved[0] += 1000
    parts.close()
    assert capture.grown == reserved[0] % 1000 > 10 * len(hooks)
    if breaking:
        breaking.end()
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_a_capture_may_end_in_the_middle(share: float, rig: Rig, yardstick: Yardstick) -> None:
    """As when the server stops: in the eager forward, or in the capture."""
    before, capture = rig.graphs.ladder, live(rig)
    turns = turns_of(capture, 100)
    parts = capture.capture(budget(90), SECONDS)
    for _ in range(int(share * turns)):
        next(parts)
    parts.close()
    assert not any(block._forward_pre_hooks for block in rig.tower.blocks)
    capture.give_up(before)
    assert rig.graphs.ladder == before
    finish(capture.capture(budget(TOKENS), SECONDS))
    for on in (budget(TOKENS), None, rig.holding(rig.items(GRIDS))):
        assert not wrong(rig, yardstick, rig.engine.launch(rig.items(GRIDS), on), 0)


def test_batches_run_on_between_timed_replays(rig: Rig, yardstick: Yardstick) -> None:
    """They share the static buffers."""
    capture, new = live(rig), budget(TOKENS)
    running: list[Running] = []
    taken: list[float | None] = []

    def timing() -> Iterator[None]:
        taken.append((yield from capture.timed(new, new, SECONDS)))

    finish(capture.capture(new, SECONDS))
    for _ in timing():
        running.append(rig.engine.launch(rig.items(GRIDS, seed=len(running)), new))
    assert not any(wrong(rig, yardstick, each, seed) for seed, each in enumerate(running))
    if rig.tower.device.type == "cuda":
        assert len(running) == REPLAYS
        assert taken[0]
        assert taken[0] > 0
    else:
        assert taken == [None]


def test_a_budget_larger_than_the_static_buffers_is_refused(rig: Rig) -> None:
    with pytest.raises(CaptureFailed, match="larger than the static buffers"):
        finish(live(rig).capture(budget(321), SECONDS))


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
            finish(capture.capture(each, SECONDS))
            graphs.append(weakref.ref(rig.graphs[each]))
        finish(capture.keep(ladder))
        assert rig.graphs.ladder == ladder
        if change % 7 == 0:
            items = rig.items(GRIDS, seed=change)
            assert not wrong(rig, yardstick, rig.engine.launch(items, rig.holding(items)), change)
        if device.type == "cuda":
            reserved.append(torch.cuda.memory_reserved(device))
    assert sum(graph() is not None for graph in graphs) == len(rig.graphs) == 4
    assert not reserved or reserved[-1] <= reserved[10] + SEGMENT, reserved
