"""The planner's invariants, on random item sets."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from vitwire_server.core.budgets import Budget, Ladder, budget, default_tokens
from vitwire_server.core.grids import Footprint
from vitwire_server.core.items import total
from vitwire_server.core.plans import Fallback
from vitwire_server.scheduling.planner import Limits, Planner

MERGE = 2


@st.composite
def footprints(draw: st.DrawFn) -> Footprint:
    frames = draw(st.integers(1, 40))
    tokens = draw(st.integers(1, 300))
    patches = tokens * MERGE**2
    return Footprint(patches * frames, tokens * frames, frames, patches)


ladders = st.lists(
    st.builds(
        Budget,
        tokens=st.integers(1, 2000),
        max_items=st.integers(1, 20),
        max_segments=st.integers(1, 64),
        max_segment_patches=st.integers(4, 4000),
    ),
    max_size=6,
    unique_by=lambda b: b.tokens,
).map(lambda budgets: Ladder(tuple(sorted(budgets))))
limits = st.builds(Limits, tokens=st.integers(1, 2000), items=st.integers(1, 64), frames=st.integers(1, 100))


@given(st.lists(footprints(), max_size=40), ladders, limits)
def test_plan_holds_each_item_once_and_no_batch_overflows(
    items: list[Footprint], ladder: Ladder, bounds: Limits
) -> None:
    plan = Planner(ladder, bounds, without_graph=Fallback.GRAPHS_OFF).plan(items)
    assert sorted(i for batch in plan.batches for i in batch.items) == list(range(len(items)))
    for batch in plan.batches:
        load = total([items[i] for i in batch.items])
        if batch.budget:
            assert batch.budget in ladder.budgets
            assert batch.budget.fits(load, len(batch.items))
            assert batch.budget == ladder.smallest_fitting(load, len(batch.items))
        if len(batch.items) > 1:
            assert load.tokens <= bounds.tokens
            assert len(batch.items) <= bounds.items
            assert load.segments <= bounds.frames


@given(st.lists(footprints(), max_size=30), ladders)
def test_items_run_eagerly_only_for_the_reason_given(items: list[Footprint], ladder: Ladder) -> None:
    planner = Planner(ladder, Limits(2000, 64, 100), without_graph=Fallback.GRAPHS_OFF)
    for batch in planner.plan(items).batches:
        for i in batch.items:
            fits = ladder.smallest_fitting(items[i], 1)
            assert (batch.budget is not None) == (fits is not None)
            if batch.fallback is Fallback.GRAPHS_OFF:
                assert not len(ladder)
            elif batch.fallback is Fallback.TOO_MANY_FRAMES:
                assert ladder.largest is not None
                assert items[i].segments > ladder.largest.max_segments
            elif batch.fallback is Fallback.OVERSIZE:
                assert fits is None


@given(st.lists(footprints(), max_size=30), ladders, limits)
def test_plan_is_deterministic(items: list[Footprint], ladder: Ladder, bounds: Limits) -> None:
    planner = Planner(ladder, bounds, without_graph=Fallback.GRAPHS_OFF)
    assert planner.plan(items) == planner.plan(list(items))


def test_small_items_share_one_replay_at_the_smallest_budget_that_holds_them() -> None:
    sizes = (64, 128, 256)
    ladder = Ladder(tuple(budget(n, merge=MERGE, max_items=8, max_frames=16) for n in sizes))
    planner = Planner(ladder, Limits(256, 8, 16), without_graph=Fallback.GRAPHS_OFF)
    items = [Footprint(160, 40, 1, 160), Footprint(80, 20, 1, 80), Footprint(160, 40, 1, 160)]
    (batch,) = planner.plan(items).batches
    assert batch.items == (0, 1, 2)
    assert batch.budget == ladder.budgets[1]


def test_batch_with_the_oldest_item_runs_first() -> None:
    planner = Planner(Ladder(), Limits(100, 8, 16), without_graph=Fallback.GRAPHS_OFF)
    items = [Footprint(4 * n, n, 1, 4 * n) for n in (30, 90, 40)]
    assert [batch.items for batch in planner.plan(items).batches] == [(0, 2), (1,)]


@given(st.integers(1, 100_000))
def test_default_ladder_ends_at_the_largest_and_bounds_padding(most: int) -> None:
    sizes = default_tokens(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for smaller, larger in pairwise(sizes):
        assert larger - smaller <= max(8, smaller * 0.25)
