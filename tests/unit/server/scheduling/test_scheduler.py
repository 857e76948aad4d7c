"""The scheduler with a runner that records what it is given, and a clock that is turned by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from threading import Event, Thread
from typing import ClassVar

import pytest

from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.costs import Costs
from vitwire_server.core.errors import DeadlineExceeded, DeviceLost, EncodeFailed, Unavailable
from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.core.items import DType, Embedding, Item, Modality, Pixels
from vitwire_server.core.plans import Batch as Planned
from vitwire_server.core.plans import Fallback
from vitwire_server.core.reports import BatchReport, Encoded, Outcome, Path, Waiting
from vitwire_server.core.runner import Collected, Running, Timings
from vitwire_server.scheduling.canary import Canary
from vitwire_server.scheduling.planner import Bounds, Planner
from vitwire_server.scheduling.scheduler import Learner, Scheduler
from vitwire_server.scheduling.tickets import Entry, Priority, Ticket

COSTS = Costs(
    replay_fixed=2e-3,
    replay_token=9.6e-6,
    eager_fixed=3.9e-3,
    eager_token=9.6e-6,
    eager_floor=4.5e-3,
    attention_pair=5e-6,
)


@dataclass
class Batch:
    """What was launched; collected in the order of launch."""

    runner: "Recorder"
    items: Sequence[Item]
    failure: EncodeFailed | None

    def collect(self) -> Collected:
        self.runner.events.append(("collect", len(self.items)))
        if self.failure:
            return Collected([self.failure] * len(self.items), None)
        results: list[Embedding | EncodeFailed] = [
            Embedding(memoryview(b""), item.output, (item.footprint.tokens, 0)) for item in self.items
        ]
        return Collected(results, Timings(0.0, 0.0, 0.0), ran_separately=self.runner.ran_separately)


@dataclass
class Recorder:
    """A runner that records its calls and runs `on_launch`."""

    depth: int = 1
    events: list[tuple[str, int]] = field(default_factory=list)
    on_launch: Callable[[Sequence[Item]], EncodeFailed | None] = lambda _: None
    ran_separately: bool = False

    def launch(self, items: Sequence[Item], budget: Budget | None) -> Running:
        self.events.append(("launch", len(items)))
        return Batch(self, items, self.on_launch(items))


@dataclass
class Notes:
    """A monitor that records its calls."""

    batches: list[BatchReport] = field(default_factory=list)
    dropped: list[tuple[str, str]] = field(default_factory=list)
    canaries: list[bool] = field(default_factory=list)

    def batch_ran(self, report: BatchReport) -> None:
        self.batches.append(report)

    def item_waited(self, seconds: float) -> None:
        assert seconds >= 0

    def item_dropped(self, stage: str, reason: str) -> None:
        self.dropped.append((stage, reason))

    def watch_queue(self, waiting: Callable[[], Waiting]) -> None:
        self.waiting = waiting

    def heartbeat(self) -> None:
        pass

    def canary_ran(self, *, passed: bool) -> None:
        self.canaries.append(passed)


class Rig:
    """A scheduler over a recorder, run to its end on demand."""

    def __init__(
        self, runner: Recorder, tokens: int = 100, canary: Canary | None = None, learner: Learner | None = None
    ) -> None:
        self.now = 0.0
        self.runner, self.notes = runner, Notes()
        planner = Planner(Ladder(), Bounds(tokens, 64, 64), without_graph=Fallback.GRAPHS_OFF, costs=COSTS)
        self.scheduler = Scheduler(runner, planner, self.notes, canary=canary, learner=learner, clock=lambda: self.now)
        self.outcomes: list[tuple[Ticket, int, Outcome]] = []

    def ticket(self, deadline: float | None = None) -> Ticket:
        ticket = Ticket(lambda index, outcome: self.outcomes.append((ticket, index, outcome)), deadline)
        return ticket

    def submit(self, ticket: Ticket, *sizes: int) -> None:
        self.scheduler.intake.submit(Entry(ticket, index, item(size), self.now) for index, size in enumerate(sizes))

    def finish(self) -> None:
        self.scheduler.intake.close()
        self.scheduler.run()


def item(tokens: int) -> Item:
    pixels = Pixels(b"abcd", DType.UINT8, (4, 1))
    return Item(
        Modality.IMAGE,
        Grid(1, 2, 2 * tokens),
        pixels,
        Footprint(4 * tokens, tokens, 1, 4 * tokens),
        DType.FLOAT32,
    )


def test_items_of_several_requests_share_a_batch_and_each_gets_its_own_rows() -> None:
    rig = Rig(Recorder())
    first, second = rig.ticket(), rig.ticket()
    rig.submit(first, 10, 20)
    rig.submit(second, 30)
    rig.finish()
    assert rig.runner.events == [("launch", 3), ("collect", 3)]
    tokens = {(n, i): o.embedding.shape[0] for n, i, o in rig.outcomes if isinstance(o, Encoded)}
    assert tokens == {(first, 0): 10, (first, 1): 20, (second, 0): 30}
    assert rig.notes.batches[0].requests == 2
    assert rig.notes.waiting()[:2] == (0, 0)


@pytest.mark.parametrize(
    ("depth", "order"),
    [(1, ["launch", "collect", "launch", "collect"]), (2, ["launch", "launch", "collect", "collect"])],
)
def test_the_next_batch_is_staged_while_one_runs_where_the_device_allows(depth: int, order: list[str]) -> None:
    rig = Rig(Recorder(depth=depth))
    rig.submit(rig.ticket(), 80, 80)
    rig.finish()
    assert [event for event, _ in rig.runner.events] == order


def test_expired_items_are_answered_before_they_cost_device_time() -> None:
    rig = Rig(Recorder())
    rig.submit(rig.ticket(deadline=5.0), 10)
    rig.submit(rig.ticket(deadline=50.0), 10)
    rig.now = 6.0
    rig.finish()
    assert rig.runner.events == [("launch", 1), ("collect", 1)]
    assert isinstance(rig.outcomes[0][2], DeadlineExceeded)
    assert isinstance(rig.outcomes[1][2], Encoded)
    assert rig.notes.dropped == [("queue", "deadline")]


def test_cancelled_items_leave_the_queue_and_are_never_delivered() -> None:
    rig = Rig(Recorder())
    cancelled, kept = rig.ticket(), rig.ticket()
    rig.submit(cancelled, 10, 10)
    rig.submit(kept, 10)
    rig.scheduler.intake.cancel(cancelled)
    assert rig.notes.waiting()[:2] == (1, 4)
    rig.finish()
    assert {ticket for ticket, _, _ in rig.outcomes} == {kept}
    assert rig.notes.dropped == [("queue", "cancelled")] * 2


def test_work_on_the_device_of_a_cancelled_request_is_not_delivered() -> None:
    rig = Rig(Recorder())
    ticket = rig.ticket()
    rig.runner.on_launch = lambda _: rig.scheduler.intake.cancel(ticket)
    rig.submit(ticket, 10)
    rig.finish()
    assert rig.outcomes == []
    assert rig.notes.dropped == [("encoded", "cancelled")]


def test_a_failed_batch_fails_its_own_items_only() -> None:
    def fail_large(items: Sequence[Item]) -> EncodeFailed | None:
        return EncodeFailed("the forward failed") if any(i.footprint.tokens > 50 for i in items) else None

    rig = Rig(Recorder(on_launch=fail_large))
    rig.submit(rig.ticket(), 80, 40)
    rig.finish()
    outcomes = {index: outcome for _, index, outcome in rig.outcomes}
    assert isinstance(outcomes[0], EncodeFailed)
    assert isinstance(outcomes[1], Encoded)
    assert len(rig.notes.batches) == 2, "failed items are counted as well"


def test_what_came_in_the_meantime_takes_its_turn() -> None:
    """A single item behind a large request waits one batch, not the whole of it."""
    rig = Rig(Recorder(), tokens=100)
    single = rig.ticket()
    order: list[int] = []

    def watch(items: Sequence[Item]) -> None:
        if not order:
            rig.submit(single, 20)
        order.append(items[0].footprint.tokens)
        if len(order) == 21:
            rig.scheduler.intake.close()

    rig.runner.on_launch = watch
    rig.submit(rig.ticket(), *[90] * 20)
    rig.scheduler.run()
    assert order.index(20) <= 2
    assert len(order) == 21


@pytest.mark.parametrize(("owner", "where"), [(Recorder, "launch"), (Planner, "plan"), (Notes, "batch_ran")])
def test_a_bug_anywhere_in_the_loop_answers_everything_and_ends_the_run(
    owner: type, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    rig = Rig(Recorder(depth=2))
    monkeypatch.setattr(owner, where, fail)
    rig.submit(rig.ticket(), 80, 80, 80)
    with pytest.raises(ZeroDivisionError):
        rig.scheduler.run()
    assert sorted(index for _, index, _ in rig.outcomes) == [0, 1, 2]
    assert all(isinstance(outcome, EncodeFailed | Encoded) for _, _, outcome in rig.outcomes)
    with pytest.raises(Unavailable):
        rig.submit(rig.ticket(), 1)


def test_an_idle_scheduler_takes_work_at_once() -> None:
    rig = Rig(Recorder())
    thread = Thread(target=rig.scheduler.run)
    thread.start()
    done = Event()
    rig.scheduler.intake.submit([Entry(Ticket(lambda *_: done.set()), 0, item(5), 0.0)])
    assert done.wait(10)
    rig.scheduler.intake.close()
    thread.join(10)
    assert not thread.is_alive()


def test_what_waits_is_shown_in_tokens_and_in_seconds_at_the_measured_pace() -> None:
    rig = Rig(Recorder())
    estimate = rig.scheduler.intake.planner.estimate

    def slow(_: Sequence[Item]) -> None:
        rig.now += 10 * 0.00486

    rig.runner.on_launch = slow
    leaving = rig.ticket()
    rig.submit(leaving, 70)
    rig.submit(rig.ticket(), 100, 100, 60)
    assert rig.notes.waiting() == (4, 16, 330, estimate(330))
    rig.scheduler.intake.cancel(leaving)
    assert rig.notes.waiting() == (3, 12, 260, estimate(260))
    rig.scheduler._step()
    assert rig.notes.waiting() == (2, 8, 160, pytest.approx(10 * estimate(160), rel=0.01))
    rig.finish()
    assert rig.notes.waiting() == (0, 0, 0, 0.0)


class TestDeadlines:
    """A forward of 100 tokens is predicted to take 4.86 ms, one of a token 4.5 ms: the floor."""

    def test_an_idle_server_refuses_only_what_its_own_time_cannot_meet(self) -> None:
        rig = Rig(Recorder())
        rig.scheduler.intake.check_deadline(rig.ticket(deadline=None), 10_000)
        rig.scheduler.intake.check_deadline(rig.ticket(deadline=0.0046), 1)
        with pytest.raises(DeadlineExceeded, match=r"0\.0045 s are needed, 0\.004 s are left"):
            rig.scheduler.intake.check_deadline(rig.ticket(deadline=0.004), 1, items=3)
        assert rig.notes.dropped == [("admission", "deadline")] * 3

    def test_what_waits_counts_by_its_share_and_by_its_priority(self) -> None:
        rig = Rig(Recorder())
        rig.submit(rig.ticket(), *[100] * 50)  # 50 batches of 4.86 ms
        single = rig.ticket(deadline=0.05)
        rig.scheduler.intake.check_deadline(single, 100)  # waits for a turn and as much again, not for all
        with pytest.raises(DeadlineExceeded):
            rig.scheduler.intake.check_deadline(single, 2000)
        batch = rig.ticket()
        batch.priority = Priority.BATCH
        rig.submit(batch, *[100] * 50)
        rig.scheduler.intake.check_deadline(single, 100)
        batch.deadline = 0.05
        with pytest.raises(DeadlineExceeded):
            rig.scheduler.intake.check_deadline(batch, 100)

    def test_what_runs_counts_at_the_pace_that_was_measured(self) -> None:
        rig = Rig(Recorder())

        def slow(items: Sequence[Item]) -> None:
            """Ten times as slow as predicted; halfway through the second batch a deadline is checked."""
            rig.now += 10 * 0.00486 / 2
            if len(rig.runner.events) > 2:
                rig.scheduler.intake.check_deadline(rig.ticket(deadline=rig.now + 0.04), 1)
                with pytest.raises(DeadlineExceeded):
                    rig.scheduler.intake.check_deadline(rig.ticket(deadline=rig.now + 0.02), 1)
            rig.now += 10 * 0.00486 / 2

        rig.runner.on_launch = slow
        rig.submit(rig.ticket(), 100, 100)
        rig.finish()
        assert len(rig.runner.events) == 4

    def test_a_slow_past_refuses_nothing_on_an_idle_server(self) -> None:
        rig = Rig(Recorder())

        def slow(_: Sequence[Item]) -> None:
            rig.now += 60.0

        rig.runner.on_launch = slow
        rig.submit(rig.ticket(), 100)
        rig.scheduler._step()
        rig.scheduler.intake.check_deadline(rig.ticket(deadline=rig.now + 0.1), 100)


class TestCanary:
    """It runs while the engine is idle, and its failures are reported."""

    @staticmethod
    def rig(fails: list[bool]) -> Rig:
        def fail(items: Sequence[Item]) -> EncodeFailed | None:
            return EncodeFailed("NaN") if items[0].footprint.tokens == 7 and fails.pop(0) else None

        canary = Canary(item(7), Planned((0,), None, Fallback.GRAPHS_OFF), seconds=10.0)
        return Rig(Recorder(on_launch=fail), canary=canary)

    def test_only_after_idleness_and_not_counted_as_an_item(self) -> None:
        rig = self.rig([False] * 9)
        rig.now = 9.0
        rig.scheduler._step()
        assert rig.runner.events == []
        rig.now = 11.0
        rig.scheduler._step()
        rig.scheduler._step()
        assert rig.runner.events == [("launch", 1), ("collect", 1)]
        assert rig.notes.canaries == [True]
        assert (rig.notes.batches, rig.outcomes) == ([], [])
        rig.now = 20.0
        rig.submit(rig.ticket(), 50)
        rig.scheduler._step()
        rig.now = 29.0
        rig.scheduler._step()
        assert rig.notes.canaries == [True], "a user's batch shows as much"
        rig.now = 31.0
        rig.scheduler._step()
        assert rig.notes.canaries == [True, True]

    def test_two_failures_in_a_row_are_a_fault_and_a_success_ends_it(self) -> None:
        rig = self.rig([True, False, True, True, False])
        faults: list[bool] = []
        for _ in range(5):
            rig.now += 11.0
            rig.scheduler._step()
            faults.append(bool(rig.scheduler.fault))
        assert faults == [False, False, False, True, False]
        assert rig.notes.canaries == [False, True, False, False, True]


def test_silence_is_what_the_work_does_not_explain() -> None:
    rig = Rig(Recorder())
    silences: list[float] = []

    def hang(_: Sequence[Item]) -> None:
        rig.now += 0.04
        silences.append(rig.scheduler.watchdog.silence())
        rig.now += 100.0
        silences.append(rig.scheduler.watchdog.silence())

    rig.runner.on_launch = hang
    rig.submit(rig.ticket(), 100)
    rig.scheduler._step()
    assert silences[0] == 0.0, "a batch may take ten times what was predicted"
    attention = 400 * 400 * 5e-6  # pairs of patches
    assert silences[1] == pytest.approx(100.04 - 0.0486 - attention, abs=0.01)
    assert rig.scheduler.watchdog.silence() == 0.0


def test_items_that_ran_out_of_memory_together_are_reported_as_eager() -> None:
    rig = Rig(Recorder(ran_separately=True))
    rig.submit(rig.ticket(), 10, 10)
    rig.finish()
    (report,) = rig.notes.batches
    assert (report.budget, report.fallback) == (None, Fallback.OUT_OF_MEMORY)
    for _, _, outcome in rig.outcomes:
        assert isinstance(outcome, Encoded)
        assert (outcome.report.path, outcome.report.fallback) == (Path.EAGER, Fallback.OUT_OF_MEMORY)


class Replacing:
    """A learner with another planner for the second step."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.seen: list[tuple[int, int]] = []
        self.steps = self.stops = 0
        self.events: list[tuple[str, int]] = []
        self.done: list[tuple[str, int]] = []

    def planned(self, window: Sequence[Footprint], taken: int) -> None:
        self.seen.append((len(window), taken))

    def seconds_until_due(self, *, idle: bool) -> float:
        return 0.0 if self.steps < 2 else inf

    def step(self) -> Planner | None:
        self.steps += 1
        return self.planner if self.steps == 2 else None

    def replaced(self) -> None:
        self.done = [*self.events]

    def stop(self) -> None:
        self.stops += 1


@pytest.mark.parametrize("depth", [1, 2])
def test_a_planner_is_replaced_between_batches_with_nothing_in_flight(depth: int) -> None:
    larger = Planner(Ladder(), Bounds(200, 64, 64), without_graph=Fallback.OVERSIZE, costs=COSTS)
    runner, learner = Recorder(depth=depth), Replacing(larger)
    canary = Canary(item(7), Planned((0,), None, Fallback.GRAPHS_OFF), seconds=10.0)
    rig = Rig(runner, canary=canary, learner=learner)
    learner.events = runner.events
    rig.submit(rig.ticket(), *[80] * 6)
    rig.finish()
    assert rig.scheduler.intake.planner is larger
    kinds = [event for event, _ in learner.done]
    assert kinds.count("launch") == kinds.count("collect") == 2 * depth - depth // 2
    after = runner.events[len(learner.done) :]
    assert ("launch", 2) in after, "two fit in a batch now"
    assert len(rig.outcomes) == 6
    assert learner.seen[0] == (1, 1)
    assert (2, 2) in learner.seen
    assert canary.batch.fallback is Fallback.OVERSIZE


@pytest.mark.parametrize("fails", [False, True])
def test_the_learner_stops_with_the_engine(fails: bool) -> None:
    learner = Replacing(Planner(Ladder(), Bounds(100, 64, 64), without_graph=Fallback.GRAPHS_OFF, costs=COSTS))
    rig = Rig(Recorder(), learner=learner)
    rig.submit(rig.ticket(), 80)
    if fails:

        def lose(_: Sequence[Item]) -> None:
            raise DeviceLost("gone")

        rig.runner.on_launch = lose
        with pytest.raises(DeviceLost):
            rig.finish()
    else:
        rig.finish()
    assert learner.stops == 1


def test_a_capture_does_not_count_as_a_slow_batch() -> None:
    class Slow(Replacing):
        def step(self) -> Planner | None:
            rig.now += 50.0
            self.steps += 1
            return None

    runner = Recorder(depth=2)
    learner = Slow(Planner(Ladder(), Bounds(100, 64, 64), without_graph=Fallback.GRAPHS_OFF, costs=COSTS))
    rig = Rig(runner, learner=learner)
    rig.submit(rig.ticket(), *[80] * 4)
    rig.finish()
    rig.scheduler.intake.check_deadline(rig.ticket(deadline=rig.now + 0.05), 80)
    assert learner.steps == 2


def test_the_learner_hears_whether_batches_wait() -> None:
    class Patient(Replacing):
        idle: ClassVar[list[bool]] = []

        def seconds_until_due(self, *, idle: bool) -> float:
            self.idle.append(idle)
            return 0.5

    runner = Recorder(depth=2)
    learner = Patient(Planner(Ladder(), Bounds(100, 64, 64), without_graph=Fallback.GRAPHS_OFF, costs=COSTS))
    rig = Rig(runner, learner=learner)
    rig.submit(rig.ticket(), *[80] * 4)
    rig.finish()
    assert learner.idle[1:3] == [False, False], "others are launched, or wait"
    assert learner.idle[-1], "after the last"
    assert learner.steps == 0
