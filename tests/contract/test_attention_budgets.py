"""Attention chosen for each budget: two of as many tokens, of which one holds short segments only."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
import torch
from torch import Tensor

from checkpoints import Checkpoints
from reference import TOLERANCE, Reference, error
from rigs import Rig
from vitwire_server.core.budgets import Budget, Ladder, budget, with_shorter
from vitwire_server.core.costs import ASSUMED
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import total
from vitwire_server.core.plans import Fallback
from vitwire_server.core.runner import Collected, Timings
from vitwire_server.runtime.attention.backends import segment_sdpa
from vitwire_server.runtime.attention.selection import LoadedBackend, Selection
from vitwire_server.runtime.kernels.operands import Segments
from vitwire_server.runtime.ladders import calibration
from vitwire_server.scheduling.planner import Bounds, Planner

if TYPE_CHECKING:
    from vitwire_server.runtime.engine import Engine

SMALL, LARGE = Grid(1, 14, 14), Grid(1, 24, 24)
"""196 and 576 patches: on either side of 256."""
CPU = torch.device("cpu")


class Backends:
    """Two that attend alike, and count the longest segments they are called for."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        short, long = (LoadedBackend(name, self._named(name)) for name in ("triton", "varlen"))
        self.selection = Selection((short, short, long, long), "to be tested")
        self.selection.register()

    def _named(self, name: str) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
            self.calls[name] += 1
            assert int(segments.boundaries.diff().max()) <= segments.longest
            return segment_sdpa(q, k, v, segments, scale)

        return attend

    def of(self, run: Callable[[], object]) -> set[str]:
        """The backends that `run` calls."""
        self.calls.clear()
        run()
        return set(self.calls)


@pytest.fixture(scope="module")
def backends() -> Backends:
    return Backends()


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def model_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def rig(model_type: str, backends: Backends, checkpoints: Checkpoints) -> Rig:
    return Rig.of(checkpoints(model_type), torch.float32, CPU, sizes=(64, 200, 320), attention=backends.selection)


def test_small_images_are_attended_in_their_own_way_and_equal_transformers(
    rig: Rig, model_type: str, backends: Backends, references: Callable[[str, torch.dtype], Reference]
) -> None:
    kinds = [(each.tokens, each.max_segment_patches) for each in rig.graphs.ladder]
    assert kinds == [(64, 256), (200, 256), (200, 800), (320, 256), (320, 1280)]
    reference = references(model_type, torch.float32)
    windows = {"triton"} if model_type == "qwen2_5_vl" else set()
    for grids, own in (
        ([SMALL] * 4, {"triton"}),
        ([LARGE], {"varlen"} | windows),
        ([SMALL, LARGE, SMALL], {"varlen"} | windows),
        ([SMALL] * 4, {"triton"}),
    ):
        rig.poison()
        items, rows = rig.items(grids, 5), []
        assert backends.of(lambda items=items, rows=rows: rows.extend(rig.run(items))) == own
        for i, (grid, got) in enumerate(zip(grids, rows, strict=True)):
            assert error(got, reference.item(grid, rig.pixels(grid, 5 + i))) <= TOLERANCE


def test_the_planner_takes_the_one_for_short_segments_where_it_is_cheaper(rig: Rig) -> None:
    ladder = rig.graphs.ladder
    short, longer = ladder.budgets[1:3]
    small, large = (rig.tower.footprint(grid) for grid in (SMALL, LARGE))
    bounds = Bounds(320, 8, 24)
    for saved in (1e-3, 0.0):
        costs = replace(ASSUMED, saved={short: saved})
        planner = Planner(ladder, bounds, without_graph=Fallback.GRAPHS_OFF, costs=costs)
        assert [batch.budget for batch in planner.plan([small] * 4).batches] == [short]
        assert [batch.budget for batch in planner.plan([large, small]).batches] == [longer]
        alone = [planner.predict(budget, [small]).work.alone for budget in (longer, short)]
        assert alone[0] - alone[1] == pytest.approx(saved)


def test_samples_fill_a_budget_that_holds_them(rig: Rig) -> None:
    for each in rig.graphs.ladder:
        load, items = summed(rig, rig.tower.samples_for(each))
        assert each.fits(load, items)
        assert load.tokens >= each.tokens / 2


@pytest.mark.parametrize("lengths", [(128,), (256,), (1024,), (128, 256), (256, 1024), (128, 256, 1024)])
def test_short_segments_are_timed_on_what_the_budget_for_longer_ones_holds_too(
    rig: Rig, lengths: tuple[int, ...]
) -> None:
    """Each further length leaves the budget for longer segments fewer slots."""
    budgets = (rig.tower.budget(tokens, max_items=64, max_frames=512) for tokens in rig.tower.sizes(4096))
    ladder = with_shorter(Ladder(tuple(budgets)), lambda most: [each for each in lengths if each < most], merge=2)
    largest = {each.tokens: each for each in ladder}
    short = [each for each in ladder if each != largest[each.tokens]]
    assert short
    for each in short:
        longer = largest[each.tokens]
        load, items = summed(rig, rig.tower.samples_for(each.within(longer)))
        assert longer.fits(load, items)
        assert each.fits(load, items)


def summed(rig: Rig, grids: Sequence[Grid]) -> tuple[Footprint, int]:
    """What images of these grids take together, and their number."""
    return total([rig.tower.footprint(grid) for grid in grids]), len(grids)


class Timed:
    """An engine on which a budget for short segments takes `share` of one for all; eager forwards as long as that."""

    depth = 2

    def __init__(self, share: float) -> None:
        self.share = share
        self.launched: list[tuple[Budget | None, int]] = []

    def launch(self, items: list[object], budget: Budget | None) -> "Timed":
        self.launched.append((budget, len(items)))
        return self

    def collect(self) -> Collected:
        budget = self.launched[-1][0]
        short = budget and budget.max_segment_patches < budget.tokens * 4
        return Collected((), Timings(0.0, 1e-2 * (self.share if short else 1.0), 0.0))


@pytest.mark.parametrize(("share", "kept"), [(0.9, True), (0.99, False), (1.5, False)])
def test_only_what_is_faster_or_holds_more_is_kept(share: float, kept: bool, rig: Rig) -> None:
    ladder = Ladder(tuple(replace(each, max_segments=8) for each in rig.graphs.ladder))
    costs = calibration.measure_costs(cast("Engine", Timed(share)), rig.tower, ladder, 320, 8)
    short = [each for each in ladder if each.tokens > 64 and each.max_segment_patches == 256]
    assert len(short) == 2
    assert set(costs.saved) == set(short)
    assert all(saved == pytest.approx(max(0.0, 1 - share) * 1e-2) for saved in costs.saved.values())
    left = calibration.worthwhile(ladder, costs)
    assert [each for each in ladder if each not in left.budgets] == ([] if kept else short)
    assert calibration.worthwhile(rig.graphs.ladder, replace(costs, saved={})) == rig.graphs.ladder


def test_budgets_for_short_segments_are_bounded() -> None:
    ladder = Ladder(tuple(budget(size, merge=2, max_items=64, max_frames=512) for size in (16, 64, 127, 128, 4096)))
    lengths = {256: [], 64: [], 508: [256], 512: [256], 8192: [256, 1024]}
    both = with_shorter(ladder, lambda longest: lengths[longest], merge=2)
    kinds = [(each.tokens, each.max_segment_patches, each.max_segments) for each in both]
    assert kinds == [
        (16, 64, 8), (64, 256, 8), (127, 508, 8), (128, 256, 8), (128, 512, 8),
        (4096, 256, 256), (4096, 1024, 64), (4096, 8192, 16),
    ]  # fmt: skip
    assert both.budgets[-1].max_items == 16
    with pytest.raises(ValueError, match="ascend strictly in tokens and longest segments"):
        Ladder((ladder.budgets[1], ladder.budgets[1]))
