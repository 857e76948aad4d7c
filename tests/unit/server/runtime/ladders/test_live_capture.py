"""Captures between batches, on a real engine. tests/gpu runs the same on a GPU."""

import gc
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest
import torch

from rigs import RIGHT, Rig, Yardstick, rows_of
from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.grids import Grid
from vitwire_server.core.runner import Running
from vitwire_server.runtime.graphs import Graph, Recorder, SimulatedRecorder
from vitwire_server.runtime.ladders.live_capture import CaptureFailed, LiveCapture
from vitwire_server.runtime.recording import is_recording, recording
from vitwire_server.towers.tower import Metadata

MODEL_TYPE = "qwen3_vl"
BF16 = torch.bfloat16
GRIDS = (Grid(1, 8, 10), Grid(2, 4, 6), Grid(1, 2, 2), Grid(1, 12, 6))
TOKENS = sum(grid.patches for grid in GRIDS) // 4
BOUND = 64 << 20
POLL_SECONDS = 0.002
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
    return Budget(tokens, min(tokens, 8), 8, 4 * tokens)


def finish(parts: Iterator[float]) -> None:
    """Leave the interpreter to the capture meanwhile, as the scheduler does."""
    for _ in parts:
        time.sleep(POLL_SECONDS)


def wrong(rig: Rig, yardstick: Yardstick, running: Running, seed: int) -> bool:
    return max(yardstick.errors(rig, rows_of(running.collect()), GRIDS, seed=seed)) >= RIGHT


def test_batches_run_on_between_the_parts_of_a_capture(rig: Rig, yardstick: Yardstick) -> None:
    """One is in flight during each part, on the budget whose static buffers the capture shares."""
    own, new = rig.holding(rig.items(GRIDS)), budget(TOKENS)
    running = [rig.engine.launch(rig.items(GRIDS), own)]
    for _ in live(rig).capture(new):
        running.append(rig.engine.launch(rig.items(GRIDS, seed=len(running)), own))
        time.sleep(POLL_SECONDS)
    for on in (new, own, new):
        running.append(rig.engine.launch(rig.items(GRIDS, seed=len(running)), on))
    assert not any(wrong(rig, yardstick, each, seed) for seed, each in enumerate(running))


def test_batches_do_not_wait_for_a_capture(rig: Rig, yardstick: Yardstick) -> None:
    """It has begun, and does not end before they are answered."""
    begun, answered = Event(), Event()

    class Slow(SimulatedRecorder):
        def capture(self, forward: Callable[[], None]) -> Callable[[], None]:
            begun.set()
            assert answered.wait(60)
            return rig.recorder.capture(forward)

    new = budget(TOKENS)
    parts = live(rig, Slow()).capture(new)
    assert next(parts) == 0
    assert begun.wait(60)
    for seed in range(3):
        items = rig.items(GRIDS, seed=seed)
        assert not wrong(rig, yardstick, rig.engine.launch(items, rig.holding(items)), seed)
        assert not wrong(rig, yardstick, rig.engine.launch(items, None), seed)
        assert next(parts) == 0
    assert new not in set(rig.graphs.ladder)
    answered.set()
    finish(parts)
    assert not wrong(rig, yardstick, rig.engine.launch(rig.items(GRIDS), new), 0)


def test_a_capture_pauses_while_a_batch_is_launched(rig: Rig, yardstick: Yardstick) -> None:
    class Running(SimulatedRecorder):
        """Runs the forward, as that of a GPU."""

        def capture(self, forward: Callable[[], None]) -> Callable[[], None]:
            with recording():
                forward()
            return forward

    new, interval = budget(TOKENS), sys.getswitchinterval()
    parts = live(rig, Running() if isinstance(rig.recorder, SimulatedRecorder) else None).capture(new)
    with rig.engine.launching:
        for _ in range(50):
            assert next(parts) == 0
            time.sleep(POLL_SECONDS)
    finish(parts)
    assert sys.getswitchinterval() == interval
    assert not wrong(rig, yardstick, rig.engine.launch(rig.items(GRIDS), new), 0)


def test_memory_is_freed_after_a_capture(rig: Rig, yardstick: Yardstick, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator keeps its cache while a graph is captured: a batch without memory waits for the end."""
    begun, steps = Event(), list[str]()

    class Slow(SimulatedRecorder):
        def capture(self, forward: Callable[[], None]) -> Callable[[], None]:
            begun.set()
            time.sleep(0.3)
            steps.append("captured")
            return rig.recorder.capture(forward)

    stock, lacking = rig.engine._forward, [torch.OutOfMemoryError("CUDA out of memory.")]

    def forward(pixels: torch.Tensor, metadata: Metadata) -> torch.Tensor:
        if lacking:
            raise lacking.pop()
        return stock(pixels, metadata)

    monkeypatch.setattr(rig.engine, "_forward", forward)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: steps.append("freed"))
    parts = live(rig, Slow()).capture(budget(TOKENS))
    next(parts)
    assert begun.wait(60)
    assert not wrong(rig, yardstick, rig.engine.launch(rig.items(GRIDS), None), 0)
    assert steps == ["captured", "freed"]
    finish(parts)


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


def test_a_capture_that_needs_an_eager_forward_gets_one(rig: Rig, yardstick: Yardstick) -> None:
    """As with kernels that cannot be loaded during a capture: the next capture begins with a forward."""

    class Lazy(SimulatedRecorder):
        forwards = captures = 0

        def capture(self, forward: Callable[[], None]) -> Callable[[], None]:
            self.captures += 1
            if self.captures > self.forwards:
                raise RuntimeError("operation not permitted when stream is capturing")
            return rig.recorder.capture(forward)

    recorder, stock = Lazy(), rig.tower.forward

    def forward(pixels: torch.Tensor, metadata: Metadata) -> torch.Tensor:
        recorder.forwards += 0 if is_recording() else 2  # a GPU's recorder calls it during the capture as well
        return stock(pixels, metadata)

    capture, new = live(rig, recorder), budget(TOKENS)
    rig.tower.forward = forward  # type: ignore[method-assign]
    finish(capture.capture(new))
    assert (recorder.forwards, recorder.captures) == (2, 2)
    finish(capture.capture(budget(90)))
    assert (recorder.forwards, recorder.captures) == (4, 3)
    running = rig.engine.launch(rig.items(GRIDS), new)
    assert not wrong(rig, yardstick, running, 0)


def test_an_error_of_another_kind_is_a_failed_capture(rig: Rig) -> None:
    class Broken(SimulatedRecorder):
        def capture(self, forward: Callable[[], None]) -> Callable[[], None]:
            raise KeyError("of a compiler")

    with pytest.raises(CaptureFailed, match="of a compiler"):
        finish(live(rig, Broken()).capture(budget(90)))


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
    capture._worker.submit(gc.collect).result()  # graphs are freed there
    assert sum(graph() is not None for graph in graphs) == 3
    assert not reserved or reserved[-1] <= reserved[10] + SEGMENT, reserved
