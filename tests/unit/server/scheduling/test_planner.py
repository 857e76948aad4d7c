"""The planner's invariants, on random item sets."""

from dataclasses import replace
from itertools import pairwise

import pytest
from bench.ascending_packing import plan_ascending
from hypothesis import given
from hypothesis import strategies as st

from vitwire_server.core.budgets import Budget, Ladder, budget, default_tokens, with_shorter
from vitwire_server.core.costs import ASSUMED, Costs, together
from vitwire_server.core.grids import Footprint
from vitwire_server.core.items import total
from vitwire_server.core.plans import Fallback, Plan
from vitwire_server.scheduling.packing import Options, fill
from vitwire_server.scheduling.planner import Bounds, Planner

MERGE = 2
GRAPHS_WIN = Costs(replay_fixed=1.0, replay_token=0.01, eager_fixed=1e9, eager_token=1.0, eager_floor=1e9)


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
limits = st.builds(Bounds, tokens=st.integers(1, 2000), items=st.integers(1, 64), frames=st.integers(1, 100))


@given(st.lists(footprints(), max_size=40), ladders, limits)
def test_plan_holds_each_item_once_and_no_batch_overflows(
    items: list[Footprint], ladder: Ladder, bounds: Bounds
) -> None:
    plan = Planner(ladder, bounds, without_graph=Fallback.GRAPHS_OFF).plan(items)
    assert sorted(i for batch in plan.batches for i in batch.items) == list(range(len(items)))
    for batch in plan.batches:
        load = total([items[i] for i in batch.items])
        if batch.budget:
            assert batch.budget in ladder.budgets
            assert batch.budget.fits(load, len(batch.items))
        if len(batch.items) > 1:
            assert load.tokens <= bounds.tokens
            assert len(batch.items) <= bounds.items
            assert load.segments <= bounds.frames


@given(st.lists(footprints(), max_size=30), ladders)
def test_items_run_eagerly_only_for_the_reason_given(items: list[Footprint], ladder: Ladder) -> None:
    planner = Planner(ladder, Bounds(2000, 64, 100), without_graph=Fallback.GRAPHS_OFF, costs=GRAPHS_WIN)
    for batch in planner.plan(items).batches:
        for i in batch.items:
            fits = ladder.smallest_fitting(items[i], 1)
            assert (batch.budget is not None) == (fits is not None)
            assert batch.fallback is not Fallback.CHEAPER_EAGER
            if batch.fallback is Fallback.GRAPHS_OFF:
                assert not len(ladder)
            elif batch.fallback is Fallback.TOO_MANY_FRAMES:
                assert ladder.largest is not None
                assert items[i].segments > ladder.largest.max_segments
            elif batch.fallback is Fallback.OVERSIZE:
                assert fits is None


def test_items_that_fill_the_device_alone_do_not_wait_for_each_other() -> None:
    image, thumbnail = Footprint(4096, 1024, 1, 4096), Footprint(196, 49, 1, 196)
    ladder = Ladder(
        tuple(budget(tokens, max_items=64, max_frames=64, merge=MERGE) for tokens in (64, 1024, 2048, 4096))
    )
    busy = Costs(replay_fixed=1e-4, replay_token=12e-6, eager_fixed=1.0, eager_token=1.0, eager_floor=1.0)
    planner = Planner(ladder, Bounds(4096, 64, 64), without_graph=Fallback.GRAPHS_OFF, costs=busy)
    assert [batch.items for batch in planner.plan([image] * 4).batches] == [(0,), (1,), (2,), (3,)]
    together = planner.plan([thumbnail] * 16).batches
    assert [len(batch.items) for batch in together] == [16]
    costly = replace(busy, replay_fixed=2e-3)
    planner = Planner(ladder, Bounds(4096, 64, 64), without_graph=Fallback.GRAPHS_OFF, costs=costly)
    assert [batch.items for batch in planner.plan([image] * 4).batches] == [(0, 1, 2, 3)]


@given(st.lists(footprints(), max_size=30), ladders, limits)
def test_plan_is_deterministic(items: list[Footprint], ladder: Ladder, bounds: Bounds) -> None:
    planner = Planner(ladder, bounds, without_graph=Fallback.GRAPHS_OFF)
    assert planner.plan(items) == planner.plan(list(items))


def test_small_items_share_one_replay_at_the_smallest_budget_that_holds_them() -> None:
    sizes = (64, 128, 256)
    ladder = Ladder(tuple(budget(n, merge=MERGE, max_items=8, max_frames=16) for n in sizes))
    planner = Planner(ladder, Bounds(256, 8, 16), without_graph=Fallback.GRAPHS_OFF, costs=GRAPHS_WIN)
    items = [Footprint(160, 40, 1, 160), Footprint(80, 20, 1, 80), Footprint(160, 40, 1, 160)]
    (batch,) = planner.plan(items).batches
    assert batch.items == (0, 1, 2)
    assert batch.budget == ladder.budgets[1]


def test_batch_with_the_oldest_item_runs_first() -> None:
    planner = Planner(Ladder(), Bounds(100, 8, 16), without_graph=Fallback.GRAPHS_OFF)
    items = [Footprint(4 * n, n, 1, 4 * n) for n in (30, 90, 40)]
    assert [batch.items for batch in planner.plan(items).batches] == [(0, 2), (1,)]


@given(st.integers(1, 100_000))
def test_default_ladder_ends_at_the_largest_and_bounds_padding(most: int) -> None:
    sizes = default_tokens(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for smaller, larger in pairwise(sizes):
        assert larger - smaller <= max(8, smaller * 0.25)


costs = st.builds(
    Costs,
    replay_fixed=st.floats(0, 5e-3),
    replay_token=st.floats(1e-7, 1e-4),
    eager_fixed=st.floats(0, 1e-2),
    eager_token=st.floats(1e-7, 1e-4),
    eager_floor=st.floats(0, 1e-2),
    measured=st.dictionaries(st.integers(1, 2000), st.floats(1e-5, 0.1), max_size=4),
)


def seconds(plan: Plan, planner: Planner, items: list[Footprint]) -> float:
    return sum(planner.work(batch, items).alone for batch in plan.batches)


def test_what_only_a_dropped_budget_would_hold_is_told_apart() -> None:
    small, large = (Ladder((budget(n, merge=MERGE, max_items=8, max_frames=16),)) for n in (64, 256))
    planner = Planner(small, Bounds(512, 8, 16), without_graph=Fallback.GRAPHS_OFF, dropped=large, costs=GRAPHS_WIN)
    reasons = {n: planner.plan([Footprint(4 * n, n, 1, 4 * n)]).batches[0].fallback for n in (60, 200, 400)}
    assert reasons == {60: None, 200: Fallback.NOT_CAPTURED, 400: Fallback.OVERSIZE}


class TestCosts:
    """Whatever was measured, the plan is never beaten by the plain alternatives."""

    @given(st.lists(footprints(), min_size=1, max_size=20), ladders, costs)
    def test_replays_never_cost_more_than_one_eager_forward(
        self, items: list[Footprint], ladder: Ladder, prices: Costs
    ) -> None:
        planner = Planner(ladder, Bounds(10**9, 10**9, 10**9), without_graph=Fallback.GRAPHS_OFF, costs=prices)
        plan = planner.plan(items)
        for batch in plan.batches:
            assert planner.work(batch, items).alone <= prices.eager(sum(items[i].tokens for i in batch.items)) + 1e-12
        for batch in plan.batches:
            for other in plan.batches:
                if batch is other or Fallback.GRAPHS_OFF in (batch.fallback, other.fallback):
                    continue
                both = sum(items[i].tokens for i in batch.items + other.items)
                if batch.budget and other.budget:
                    apart = planner.work(batch, items).alone + planner.work(other, items).alone
                    assert apart <= prices.eager(both) + 1e-12

    def test_padding_that_costs_more_than_eager_is_not_computed(self) -> None:
        """vLLM #52229: with budgets of 64 and 4096, 70 tokens were padded to 4096."""
        ladder = Ladder(tuple(budget(n, merge=MERGE, max_items=8, max_frames=16) for n in (64, 4096)))
        planner = Planner(ladder, Bounds(4096, 8, 16), without_graph=Fallback.GRAPHS_OFF)
        (batch,) = planner.plan([Footprint(280, 70, 1, 280)]).batches
        assert (batch.budget, batch.fallback) == (None, Fallback.CHEAPER_EAGER)
        two = [Footprint(140, 35, 1, 140)] * 2
        slow = replace(ASSUMED, eager_floor=9e-3)
        planner = Planner(ladder, Bounds(4096, 8, 16), without_graph=Fallback.GRAPHS_OFF, costs=slow)
        assert [batch.budget for batch in planner.plan(two).batches] == [ladder.budgets[0]] * 2

    def test_a_larger_budget_that_was_measured_cheaper_is_taken(self) -> None:
        ladder = Ladder(tuple(budget(n, merge=MERGE, max_items=8, max_frames=16) for n in (64, 128)))
        prices = Costs(1.0, 0.0, 9.0, 0.0, 9.0, measured={64: 0.5, 128: 0.2})
        planner = Planner(ladder, Bounds(128, 8, 16), without_graph=Fallback.GRAPHS_OFF, costs=prices)
        (batch,) = planner.plan([Footprint(40, 10, 1, 40)]).batches
        assert batch.budget == ladder.budgets[1]


class TestFill:
    """Subset sums: tokens meet budgets exactly wherever some subset of the items can."""

    @given(
        st.lists(st.integers(1, 600), min_size=1, max_size=24),
        st.lists(st.integers(1, 1000), min_size=1, max_size=6, unique=True),
    )
    def test_groups_partition_the_items_and_fit_the_largest_budget(self, sizes: list[int], rungs: list[int]) -> None:
        ladder = sorted({*rungs, max(*sizes, *rungs)})
        items = [Footprint(4 * n, n, 1, 4 * n) for n in sizes]
        groups = fill(range(len(items)), items, Options(ladder, ASSUMED.replay))
        assert sorted(i for group in groups for i in group) == list(range(len(items)))
        for group in groups:
            assert 0 < sum(sizes[i] for i in group) <= ladder[-1]

    @given(st.lists(st.integers(1, 1280), min_size=1, max_size=64))
    def test_hardly_slower_than_the_reference(self, sizes: list[int]) -> None:
        items = [Footprint(4 * n, n, 1, 4 * n) for n in sizes]
        doubling = [64 << i for i in range(7)]
        ladder = Ladder(tuple(budget(n, merge=MERGE, max_items=64, max_frames=512) for n in doubling))
        planner = Planner(ladder, Bounds(4096, 64, 512), without_graph=Fallback.GRAPHS_OFF)
        ours, theirs = planner.plan(items), plan_ascending(items, ladder, 64)
        seconds = [together(planner.work(batch, items) for batch in plan.batches) for plan in (ours, theirs)]
        assert seconds[0] <= 1.02 * seconds[1], "by no more than what it takes to return the first rows sooner"

    def test_two_budgets_are_met_exactly(self) -> None:
        sizes = [700, 500, 300, 120, 80]
        items = [Footprint(4 * n, n, 1, 4 * n) for n in sizes]
        groups = fill(range(5), items, Options([820, 880, 1000], ASSUMED.replay))
        assert sorted(sum(sizes[i] for i in group) for group in groups) == [820, 880]


@pytest.mark.parametrize("tokens", [(400, *[4] * 63), (1024, *[16] * 63), (*[324] * 4, *[4] * 60)])
def test_small_images_do_not_break_up_into_many_batches_next_to_large_ones(tokens: tuple[int, ...]) -> None:
    """Budgets for long segments have few slots where there are others for short ones."""
    sizes = [budget(size, merge=MERGE, max_items=256, max_frames=256) for size in default_tokens(4096)]
    ladder = with_shorter(Ladder(tuple(sizes)), lambda longest: [256] if longest > 256 else [], merge=MERGE)
    planner = Planner(ladder, Bounds(4096, 256, 256), without_graph=Fallback.GRAPHS_OFF, costs=GRAPHS_WIN)
    plan = planner.plan([Footprint(4 * each, each, 1, 4 * each) for each in tokens])
    assert len(plan.batches) <= 3


def test_a_clip_that_is_too_large_does_not_count_as_one_of_too_many_frames() -> None:
    """Though the largest budget has fewer slots than the one for short segments."""
    sizes = Ladder((budget(4096, merge=MERGE, max_items=256, max_frames=256),))
    ladder = with_shorter(sizes, lambda longest: [256] if longest > 256 else [], merge=MERGE)
    planner = Planner(ladder, Bounds(4096, 256, 256), without_graph=Fallback.GRAPHS_OFF)
    (batch,) = planner.plan([Footprint(100 * 300, 100 * 75, 100, 300)]).batches
    assert batch.fallback is Fallback.OVERSIZE
    (batch,) = planner.plan([Footprint(257 * 4, 257, 257, 4)]).batches
    assert batch.fallback is Fallback.TOO_MANY_FRAMES
