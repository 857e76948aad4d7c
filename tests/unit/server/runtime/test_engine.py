"""The engine when things fail, and when batches overlap. tests/gpu runs the same on a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints import Checkpoints
from rigs import BUDGETS, RIGHT, Rig, Yardstick, rows_of
from vitwire_server.core.errors import DeviceLost, EncodeFailed, InvalidTensors, OutOfMemory
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import DType, Item, Modality, Pixels
from vitwire_server.runtime.engine import _non_finite
from vitwire_server.runtime.graphs import Recorder, SimulatedRecorder
from vitwire_server.runtime.memory.streams import TORCH_TYPES, Download

MODEL_TYPE = "qwen3_vl"
BF16 = torch.bfloat16
GRIDS = (Grid(1, 8, 10), Grid(2, 4, 6), Grid(1, 2, 2), Grid(1, 12, 6))


@pytest.fixture(scope="module")
def rig(checkpoints: Checkpoints, device: torch.device) -> Rig:
    return Rig.of(checkpoints(MODEL_TYPE), BF16, device)


@pytest.fixture(scope="module")
def yardstick(yardsticks: Callable[[str, torch.dtype], Yardstick]) -> Yardstick:
    return yardsticks(MODEL_TYPE, BF16)


class Failing(SimulatedRecorder):
    """A recorder that cannot record the `number`-th graph that it is asked for."""

    def __init__(self, inner: Recorder, number: int, error: Exception) -> None:
        self._inner = inner
        self._left = number
        self._error = error

    def record(self, forward: Callable[[], None]) -> Callable[[], None]:
        self._left -= 1
        if self._left == 0:
            raise self._error
        return self._inner.record(forward)


class TestCaptureFails:
    """A budget without a graph is reported and never planned; the others are used."""

    @pytest.mark.parametrize(
        ("number", "failure"),
        [
            (1, torch.OutOfMemoryError("no graph here")),
            (2, RuntimeError("no graph here\nat line 3")),
            (len(BUDGETS), RuntimeError("no graph here")),
        ],
        ids=["largest", "second", "smallest"],
    )
    def test_others_serve(
        self, number: int, failure: Exception, checkpoints: Checkpoints, device: torch.device, yardstick: Yardstick
    ) -> None:
        rig = Rig.of(checkpoints(MODEL_TYPE), BF16, device, wrap=lambda inner: Failing(inner, number, failure))
        gone = BUDGETS[-number]
        assert {each.tokens: reason for each, reason in rig.graphs.dropped.items()} == {gone: "no graph here"}
        assert [each.tokens for each in rig.graphs.ladder] == [size for size in BUDGETS if size != gone]
        grids = [*GRIDS, Grid(1, 16, 18), Grid(1, 36, 36)]
        items = rig.items(grids)
        for batch in rig.planner.plan([item.footprint for item in items]).batches:
            assert batch.budget is None or batch.budget.tokens != gone
        assert max(yardstick.errors(rig, rig.run(items), grids)) < RIGHT

    def test_all_of_them_leaves_eager(
        self, checkpoints: Checkpoints, device: torch.device, yardstick: Yardstick
    ) -> None:
        class Never(SimulatedRecorder):
            def record(self, forward: Callable[[], None]) -> Callable[[], None]:
                raise RuntimeError("no graphs on this device")

        rig = Rig.of(checkpoints(MODEL_TYPE), BF16, device, wrap=lambda _: Never())
        assert (len(rig.graphs), len(rig.graphs.dropped)) == (0, len(BUDGETS))
        assert max(yardstick.errors(rig, rig.run(rig.items(GRIDS)), GRIDS)) < RIGHT


class TestOutOfMemory:
    """A batch that is too large is run item by item; only an item that is too large alone fails."""

    def limit(self, rig: Rig, monkeypatch: pytest.MonkeyPatch, patches: int) -> None:
        """Eager forwards of more than so many patches run out of memory."""
        forward = rig.tower.forward

        def limited(pixels: Tensor, metadata: Any) -> Tensor:
            if len(pixels) > patches:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99 GiB.")
            return forward(pixels, metadata)

        monkeypatch.setattr(rig.tower, "forward", limited)

    def test_items_succeed_one_by_one(self, rig: Rig, yardstick: Yardstick, monkeypatch: pytest.MonkeyPatch) -> None:
        self.limit(rig, monkeypatch, max(grid.patches for grid in GRIDS))
        collected = rig.engine.launch(rig.items(GRIDS), None).collect()
        assert max(yardstick.errors(rig, rows_of(collected), GRIDS)) < RIGHT
        assert collected.timings
        assert collected.timings.execute > 0
        assert collected.ran_separately

    def test_an_item_too_large_alone_fails_alone(
        self, rig: Rig, yardstick: Yardstick, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.limit(rig, monkeypatch, 75)
        results = rig.engine.launch(rig.items(GRIDS), None).collect().results
        failed = [isinstance(result, OutOfMemory) for result in results]
        assert failed == [grid.patches > 75 for grid in GRIDS]
        assert isinstance(rig.engine.launch(rig.items(GRIDS[:1]), None).collect().results[0], OutOfMemory)

    def test_a_replay_gives_way_to_eager_forwards(
        self, rig: Rig, yardstick: Yardstick, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        items = rig.items(GRIDS)
        budget = rig.holding(items)

        def replay() -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        monkeypatch.setattr(rig.graphs[budget], "replay", replay)
        assert max(yardstick.errors(rig, rows_of(rig.engine.launch(items, budget).collect()), GRIDS)) < RIGHT
        monkeypatch.undo()
        assert max(yardstick.errors(rig, rows_of(rig.engine.launch(items, budget).collect()), GRIDS)) < RIGHT


class TestDeviceLost:
    """Errors that need a new process are reported as such; other errors affect one batch only."""

    def test_at_launch(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forward_raises(rig, monkeypatch, torch.AcceleratorError("CUDA error: illegal access\nCompile with ..."))
        with pytest.raises(DeviceLost, match=r"^CUDA error: illegal access$"):
            rig.engine.launch(rig.items(GRIDS), None)

    def test_while_rows_are_on_their_way(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        def wait() -> tuple[float, float]:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

        monkeypatch.setattr(rig.engine._streams, "download", lambda rows, checks, *_: Download([], checks, wait))
        launched = rig.engine.launch(rig.items(GRIDS), None)
        with pytest.raises(DeviceLost, match="device-side assert"):
            launched.collect()

    def test_another_error_fails_the_batch_only(
        self, rig: Rig, yardstick: Yardstick, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.forward_raises(rig, monkeypatch, RuntimeError("shapes do not match"))
        results = rig.engine.launch(rig.items(GRIDS), None).collect().results
        assert all(isinstance(result, EncodeFailed) for result in results)
        monkeypatch.undo()
        rows = rows_of(rig.engine.launch(rig.items(GRIDS), None).collect())
        assert max(yardstick.errors(rig, rows, GRIDS)) < RIGHT

    def forward_raises(self, rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        def forward(*_: Any) -> Tensor:
            raise error

        monkeypatch.setattr(rig.tower, "forward", forward)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_embedding_that_is_not_finite_names_what_came_in(dtype: torch.dtype) -> None:
    nan, inf = float("nan"), float("inf")
    reason = "holds NaN or infinity"
    for value in (nan, inf, -inf):
        assert blamed(dtype, torch.float32, value) == {"pixels": reason}
    assert blamed(dtype, torch.float32, 1.0, inf) == {"crops": reason}
    assert blamed(dtype, torch.float32, nan, nan) == {"pixels": reason, "crops": reason}
    assert blamed(dtype, torch.float32, 1.0, 6e4) == {}, "finite pixels are no mistake of the client"


def test_pixels_beyond_the_range_of_the_tower_are_the_client_s_mistake() -> None:
    assert blamed(torch.float32, torch.float16, 6e4) == blamed(torch.uint8, torch.float16, 255) == {}
    assert blamed(torch.float32, torch.float16, 1e6)["pixels"].startswith("holds values beyond the range of float16")
    assert blamed(torch.bfloat16, torch.float16, -1e6).keys() == {"pixels"}
    assert blamed(torch.float32, torch.bfloat16, 1e30) == {}


def blamed(sent: torch.dtype, tower: torch.dtype, pixels: float, crops: float | None = None) -> dict[str, str]:
    """What a client that sent these extremes gets as its mistake, by tensor."""

    def view(value: float) -> Pixels:
        raw = torch.tensor([[0, value, 1]], dtype=sent).view(torch.uint8).numpy().data
        return Pixels(raw, next(each for each, name in TORCH_TYPES.items() if name is sent), (1, 3))

    second = None if crops is None else view(crops)
    item = Item(Modality.IMAGE, Grid(1, 1, 1), view(pixels), Footprint(1, 1, 1, 1), DType.FLOAT32, crops=second)
    found = _non_finite(item, tower)
    return found.reasons if isinstance(found, InvalidTensors) else {}


class TestOverlap:
    """Batches are launched before earlier ones are collected, and share static buffers."""

    @pytest.mark.parametrize("path", ["replays", "eager", "mixed"])
    def test_rows_are_those_of_their_own_batch(self, path: str, rig: Rig, yardstick: Yardstick) -> None:
        batches = [rig.items(GRIDS, seed=10 * number) for number in range(4)]
        budgets = [
            None if path == "eager" or (path == "mixed" and n % 2) else rig.holding(batches[0]) for n in range(4)
        ]
        running = [rig.engine.launch(items, budget) for items, budget in zip(batches, budgets, strict=True)]
        for number in (0, 2, 1, 3):
            rows = rows_of(running[number].collect())
            assert max(yardstick.errors(rig, rows, GRIDS, seed=10 * number)) < RIGHT

    def test_a_larger_batch_behind_a_smaller_one(self, rig: Rig, yardstick: Yardstick) -> None:
        small, large = [Grid(1, 2, 4)], [Grid(1, 20, 20), Grid(3, 4, 4)]
        sequence = [small, large, small, large, small]
        running = [rig.engine.launch(items, rig.holding(items)) for items in (rig.items(grids) for grids in sequence)]
        for launched, grids in zip(running, sequence, strict=True):
            assert max(yardstick.errors(rig, rows_of(launched.collect()), grids)) < RIGHT

    def test_items_that_change_and_come_back_in_one_budget(self, rig: Rig, yardstick: Yardstick) -> None:
        one, other = [Grid(1, 4, 6), Grid(1, 8, 4)], [Grid(1, 8, 4), Grid(1, 4, 6)]
        budget = rig.holding(rig.items(one))
        for seed, grids in enumerate((one, one, other, one)):
            rows = rows_of(rig.engine.launch(rig.items(grids, seed=seed), budget).collect())
            assert max(yardstick.errors(rig, rows, grids, seed=seed)) < RIGHT
