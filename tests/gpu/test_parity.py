"""Rows from the device against plain transformers: in float32 on the host, and in bfloat16 on the same device."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from checkpoints import Checkpoints
from reference import TOLERANCE, Array
from rigs import Rig, Yardstick, rows_of
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import DType, Modality

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
BF16 = torch.bfloat16
MIXED = (Grid(1, 8, 12), Grid(4, 6, 4), Grid(1, 2, 2), Grid(2, 10, 6), Grid(1, 14, 18), Grid(6, 2, 4), Grid(1, 4, 20))
LARGE = (Grid(1, 20, 20), Grid(5, 6, 8))
SMALL = (Grid(1, 2, 4),)
LOSS = 1.1
"""Our bfloat16 may lose so many times what transformers' own bfloat16 loses on the same device."""


@pytest.fixture(scope="module", params=MODEL_TYPES)
def model_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def rig(model_type: str, checkpoints: Checkpoints, device: torch.device) -> Rig:
    made = Rig.of(checkpoints(model_type), BF16, device)
    assert not made.graphs.dropped, made.graphs.dropped
    return made


@pytest.fixture(scope="module")
def yardstick(model_type: str, yardsticks: Callable[[str, torch.dtype], Yardstick]) -> Yardstick:
    return yardsticks(model_type, BF16)


@pytest.fixture(scope="module")
def bound(rig: Rig, yardstick: Yardstick) -> Callable[[Sequence[Array], Sequence[Grid], int], None]:
    """Checks rows of `rig.items(grids, seed)` against what transformers loses on them and on others."""
    usual = yardstick.lost(rig, [*MIXED, *LARGE, *SMALL])

    def check(rows: Sequence[Array], grids: Sequence[Grid], seed: int = 0) -> None:
        errors = yardstick.errors(rig, rows, grids, seed)
        lost = usual + yardstick.lost(rig, grids, seed)
        told = dict(zip(map(str, grids), errors, strict=True))
        assert max(errors) <= LOSS * max(lost), (told, lost)

    return check


@pytest.mark.parametrize("path", ["replay", "eager"])
@pytest.mark.parametrize("packed", [False, True], ids=["alone", "packed"])
class TestBfloat16:
    """Images and clips, mixed, alone and together."""

    def test_loses_no_more_than_transformers(self, path: str, packed: bool, rig: Rig, yardstick: Yardstick) -> None:
        items = rig.items(MIXED)
        batches = [items] if packed else [[item] for item in items]
        rows = []
        for batch in batches:
            budget = rig.holding(batch) if path == "replay" else None
            rows += rows_of(rig.engine.launch(batch, budget).collect())
        ours, theirs = yardstick.errors(rig, rows, MIXED), yardstick.lost(rig, MIXED)
        assert np.mean(ours) <= LOSS * np.mean(theirs)
        assert max(ours) <= LOSS * max(theirs)


def test_float32_eager_is_as_near_as_transformers_on_the_device(
    model_type: str, checkpoints: Checkpoints, device: torch.device, yardsticks: Callable[[str, torch.dtype], Yardstick]
) -> None:
    rig, yardstick = (
        Rig.of(checkpoints(model_type), torch.float32, device, sizes=()),
        yardsticks(model_type, torch.float32),
    )
    errors = yardstick.errors(rig, rig.run(rig.items(MIXED)), MIXED)
    assert max(errors) <= max(TOLERANCE, LOSS * max(yardstick.lost(rig, MIXED)))


class TestStaticBuffers:
    """Nothing of an earlier batch, of padding or of unwritten memory reaches a row."""

    def test_poisoned_small_large_small(self, rig: Rig, bound: Callable[..., None]) -> None:
        for grids in (SMALL, LARGE, SMALL, MIXED[:4], SMALL):
            rig.poison()
            items = rig.items(grids)
            bound(rows_of(rig.engine.launch(items, rig.holding(items)).collect()), grids)

    def test_a_batch_of_nan_leaves_nothing_behind(self, rig: Rig, bound: Callable[..., None]) -> None:
        """It fills the pool's intermediates with NaN, which the next replays of every budget find there."""
        for budget in rig.graphs.ladder:
            grid = Grid(1, 2, 2 * budget.tokens)
            bad = rig.item(grid, torch.full_like(rig.pixels(grid, 0), torch.nan))
            (refused,) = rig.engine.launch([bad], budget).collect().results
            assert isinstance(refused, Exception), "rows that are not finite are never returned"
            for following in rig.graphs.ladder:
                good = rig.items(SMALL)
                bound(rows_of(rig.engine.launch(good, following).collect()), SMALL)

    def test_an_item_of_nan_spoils_no_other_in_its_batch(self, rig: Rig, bound: Callable[..., None]) -> None:
        grid = Grid(2, 4, 4)
        bad = rig.item(grid, torch.full_like(rig.pixels(grid, 0), torch.nan))
        first, *others = rig.items(MIXED)
        batch = [first, bad, *others]
        results = rig.engine.launch(batch, rig.holding(batch)).collect().results
        assert isinstance(results[1], Exception)
        good = [result for result in results if not isinstance(result, Exception)]
        bound([np.frombuffer(each.data, np.float32).reshape(each.shape) for each in good], MIXED)

    def test_every_budget_gives_the_same_item(self, rig: Rig, bound: Callable[..., None]) -> None:
        items = rig.items(SMALL)
        for budget in rig.graphs.ladder:
            bound(rows_of(rig.engine.launch(items, budget).collect()), SMALL)


def test_planned_queues_of_images_and_clips(rig: Rig, bound: Callable[..., None]) -> None:
    rng = np.random.default_rng(4)
    for seed in range(100, 500, 100):
        sides = 2 * rng.integers(1, 9, size=(12, 2))
        grids = [Grid(int(rng.choice([1, 1, 2, 3])), int(h), int(w)) for h, w in sides]
        bound(rig.run(rig.items(grids, seed)), grids, seed)


def test_compact_pixels_are_normalised_on_the_device(rig: Rig) -> None:
    """uint8 and one frame of two, in one batch with floats of both frames, against the same as floats."""
    grid, geometry = Grid(1, 8, 10), rig.tower.geometry
    raw = torch.randint(0, 256, (grid.patches, geometry.channels, 1, geometry.patch**2), dtype=torch.uint8)
    scale, offset = (x.cpu() for x in rig.engine._stager._affine[Modality.IMAGE])
    floats = (raw * scale + offset).expand(-1, -1, geometry.temporal, -1).to(BF16)
    batch = [rig.item(grid, raw.flatten(1)), rig.item(grid, floats.flatten(1))]
    compact, full = rows_of(rig.engine.launch(batch, rig.holding(batch)).collect())
    assert np.linalg.norm(compact - full) <= 0.02 * np.linalg.norm(full)  # bfloat16 rounds pixels at 2^-9


class TestCudaOnly:
    """What simulated graphs cannot show."""

    @pytest.fixture(autouse=True)
    def on_cuda(self, device: torch.device) -> None:
        if device.type != "cuda":
            pytest.skip("only a GPU can run this")

    @pytest.mark.parametrize("path", ["replay", "eager"])
    def test_launching_waits_for_nothing(self, path: str, rig: Rig) -> None:
        """Metadata of the grids is there already; a launch then only enqueues."""
        items = rig.items(MIXED)
        budget = rig.holding(items) if path == "replay" else None
        rig.engine.launch(items, budget).collect()
        torch.cuda.set_sync_debug_mode("error")
        try:
            running = rig.engine.launch(items, budget)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        rows_of(running.collect())

    def test_a_new_grid_waits_for_nothing_either(self, rig: Rig) -> None:
        items = rig.items([Grid(1, 6, 18), Grid(2, 2, 10)])
        torch.cuda.set_sync_debug_mode("error")
        try:
            running = rig.engine.launch(items, rig.holding(items))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        rows_of(running.collect())

    def test_a_launch_returns_while_the_device_is_still_busy(self, rig: Rig) -> None:
        items = rig.items(MIXED)
        budget = rig.holding(items)
        rig.engine.launch(items, budget).collect()
        compute, done = rig.engine._streams.compute, torch.cuda.Event()
        with torch.cuda.stream(compute):
            torch.cuda._sleep(1 << 30)  # about half a second of cycles
        running = rig.engine.launch(items, budget)
        done.record(compute)
        assert not done.query()
        rows_of(running.collect())
        assert done.query()

    def test_replays_are_bitwise_repeatable_between_other_batches(self, rig: Rig) -> None:
        items, other = rig.items(MIXED), rig.items(LARGE)
        budget = rig.holding(items)
        first = rows_of(rig.engine.launch(items, budget).collect())
        for _ in range(5):
            running = [rig.engine.launch(batch, rig.holding(batch)) for batch in (other, items, other)]
            again = [rows_of(each.collect()) for each in running][1]
            for one, two in zip(first, again, strict=True):
                np.testing.assert_array_equal(one, two)

    def test_a_failed_capture_leaves_streams_and_allocator_in_order(
        self, model_type: str, checkpoints: Checkpoints, device: torch.device, yardstick: Yardstick
    ) -> None:
        """A synchronisation within the largest budget's capture makes it fail for real, not by a stub."""

        class Syncing:
            def __init__(self, inner: object) -> None:
                self._inner, self._first = inner, True

            def record(self, forward: Callable[[], None]) -> Callable[[], None]:
                if not self._first:
                    return self._inner.record(forward)
                self._first = False

                def syncing() -> None:
                    forward()
                    if torch.cuda.is_current_stream_capturing():
                        torch.cuda.current_stream().synchronize()

                return self._inner.record(syncing)

        before = torch.cuda.current_stream(device)
        rig = Rig.of(checkpoints(model_type), BF16, device, wrap=Syncing)
        assert [budget.tokens for budget in rig.graphs.dropped] == [320]
        assert torch.cuda.current_stream(device) == before
        assert max(yardstick.errors(rig, rig.run(rig.items(MIXED)), MIXED)) < 0.1


def test_rows_come_in_the_type_asked_for(rig: Rig, device: torch.device) -> None:
    (item,) = rig.items(SMALL)
    exact = rows_of(rig.engine.launch([item], rig.holding([item])).collect())[0]
    half = replace(item, output=DType.BFLOAT16)
    (result,) = rig.engine.launch([half], rig.holding([half])).collect().results
    assert not isinstance(result, Exception)
    rows = torch.frombuffer(bytearray(result.data), dtype=BF16).view(result.shape).float().numpy()
    np.testing.assert_array_equal(rows, exact)
