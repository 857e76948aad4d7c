"""What a host and a device take together, and what the planner and the forecast make of it."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from vitwire_server.core.budgets import Ladder, budget
from vitwire_server.core.costs import ASSUMED, Timeline, Work, together
from vitwire_server.core.grids import Footprint
from vitwire_server.core.plans import Fallback, Plan
from vitwire_server.scheduling.forecast import Forecast
from vitwire_server.scheduling.planner import Bounds, Planner

REPLAY, EAGER = Work(1.0, 1.0, 4.0), Work(9.0, 1.0, 4.0)
works = st.lists(
    st.builds(
        lambda host, lead, device: Work(host + lead, lead, device),
        *(st.just(0.0) | st.floats(1e-9, most) for most in (10, 1, 20)),  # seconds; their ratios must not underflow
    ),
    max_size=8,
)
LADDER = Ladder(tuple(budget(size, merge=2, max_items=64, max_frames=512) for size in (64, 1024, 1280, 2048, 4096)))


def image(tokens: int) -> Footprint:
    return Footprint(4 * tokens, tokens, 1, 4 * tokens)


def timeline(batches: Sequence[Work]) -> Timeline:
    made = Timeline()
    for work in batches:
        made.run(work)
    return made


def test_an_idle_engine_waits_for_the_host_and_a_busy_one_for_the_device() -> None:
    assert timeline([REPLAY]).end == 5.0
    assert timeline([EAGER]).end == 9.0, "its kernels run while others are launched"
    assert timeline([REPLAY] * 10).end == 41.0, "the host is hidden"
    assert timeline([EAGER] * 10).end == 90.0, "the device waits for the host"
    behind = timeline([Work(1.0, 1.0, 20.0), EAGER])
    assert behind.end == 25.0
    assert behind.backlog == 4.0, "two are in flight: the host waits for the first"


@given(works)
def test_no_order_is_done_before_what_the_host_and_the_device_need(batches: list[Work]) -> None:
    end = timeline(batches).end
    assert end <= sum(work.host + work.device for work in batches) + 1e-9
    assert end >= max(sum(work.host for work in batches), sum(work.device for work in batches)) - 1e-9
    if len(batches) == 1:
        assert end == together(batches) == batches[0].alone


@given(works, st.floats(0.1, 10))
def test_a_forecast_follows_the_timeline_at_the_pace_of_the_device(batches: list[Work], pace: float) -> None:
    forecast, real = Forecast(), Timeline(depth=1)
    for work in batches:
        started = real.end
        forecast.launched(work, started)
        real = Timeline(depth=1)
        real.run(work.scaled(pace))
        forecast.ran(work, started, started + real.end)
        real.end += started
        assert forecast.backlog(real.end) == 0.0
    if any(work.alone for work in batches):
        assert abs(forecast.pace - pace) < 1e-6


class TestPlanner:
    """One eager forward of 1100 tokens for a replay of 1280: less of the device, more of the host."""

    planner = Planner(LADDER, Bounds(4096, 64, 512), without_graph=Fallback.GRAPHS_OFF)

    def fallbacks(self, plan: Plan) -> list[Fallback | None]:
        return [batch.fallback for batch in plan.batches]

    def test_the_host_of_small_items_is_never_hidden(self) -> None:
        for backlog in (0.0, 5e-3):
            assert self.fallbacks(self.planner.plan([image(50)], backlog)) == [None]

    def test_an_idle_engine_takes_the_shorter_of_both(self) -> None:
        (batch,) = self.planner.plan([image(1100)]).batches
        assert batch.fallback is Fallback.CHEAPER_EAGER
        slow = replace(ASSUMED, eager_host=14e-3)
        planner = Planner(LADDER, Bounds(4096, 64, 512), without_graph=Fallback.GRAPHS_OFF, costs=slow)
        assert self.fallbacks(planner.plan([image(1100)])) == [None]

    def test_a_busy_device_hides_the_host_but_not_for_nothing(self) -> None:
        slow = replace(ASSUMED, eager_host=14e-3)
        planner = Planner(LADDER, Bounds(4096, 64, 512), without_graph=Fallback.GRAPHS_OFF, costs=slow)
        assert self.fallbacks(planner.plan([image(1300)], 0.03)) == [Fallback.CHEAPER_EAGER], "saves 6 ms of padding"
        assert self.fallbacks(planner.plan([image(1250)], 0.03)) == [None], "saves 0.3 ms, holds the host for 13.5"

    def test_hidden_host_is_spent_once(self) -> None:
        """Each of many batches could be eager behind the others, but the host launches one after the other."""
        costs = replace(ASSUMED, eager_host=40e-3)
        planner = Planner(LADDER, Bounds(4096, 64, 512), without_graph=Fallback.GRAPHS_OFF, costs=costs)
        plan = planner.plan([image(1500)] * 13)
        eager = sum(batch.budget is None for batch in plan.batches)
        assert 0 < eager < len(plan.batches)
        total = sum(planner.work(batch, [image(1500)] * 13).host for batch in plan.batches)
        assert total <= sum(planner.work(batch, [image(1500)] * 13).device for batch in plan.batches)

    @given(st.lists(st.integers(1, 1280), min_size=1, max_size=24), st.floats(0, 0.05))
    def test_a_plan_is_never_predicted_slower_than_replays_alone(self, sizes: list[int], backlog: float) -> None:
        items = [image(size) for size in sizes]
        never = replace(ASSUMED, eager_floor=1e9)
        replays = Planner(LADDER, Bounds(4096, 64, 512), without_graph=Fallback.GRAPHS_OFF, costs=never)
        ours, theirs = (
            together((planner.work(batch, items) for batch in planner.plan(items, backlog).batches), backlog)
            for planner in (self.planner, replays)
        )
        assert ours <= theirs + 1e-9

    def test_a_backlog_of_large_work_is_estimated_by_the_device(self) -> None:
        full = ASSUMED.replay_work(4096)
        assert self.planner.estimate(4096) == full.alone
        assert abs(self.planner.estimate(40960) - (full.lead + 10 * full.device)) < 1e-9
