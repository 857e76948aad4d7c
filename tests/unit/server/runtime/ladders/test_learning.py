"""The learner on a real engine with simulated graphs: it fits, captures, swaps, and stops after failures."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
import torch

from rigs import Rig
from vitwire_server.core.budgets import Budget, Ladder, with_shorter
from vitwire_server.core.capacities import PackedCapacities
from vitwire_server.core.costs import ASSUMED
from vitwire_server.core.grids import Footprint
from vitwire_server.core.plans import Fallback
from vitwire_server.fitting.learned import Demands, StateFile
from vitwire_server.observe.metrics import Metrics
from vitwire_server.runtime.ladders import learning
from vitwire_server.runtime.ladders.learning import LadderLearner
from vitwire_server.runtime.ladders.live_capture import LiveCapture
from vitwire_server.scheduling.planner import Bounds, Planner

DEFAULT = (160, 320, 640)
MOST = DEFAULT[-1]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Learning:
    """A learner, the planner in use, and what came of it."""

    def __init__(self, folder: Path, state: Path, device: torch.device) -> None:
        self.rig = Rig.of(folder, torch.float32, device, sizes=())
        self.demands = Demands(PackedCapacities(2), MOST, max_items=8, max_frames=24)
        self.clock, self.metrics = Clock(), Metrics()
        self.metrics.ladder.in_use(self.ladder(DEFAULT))
        self.file = StateFile.in_folder(state, "01", "cpu", MOST)
        learned = self.file.read()
        default = self.ladder(DEFAULT)
        captured = self.ladder(learned.sizes) if learned else default
        self.rig.graphs.__init__(self.rig.tower, captured, self.rig.recorder)
        self.planner = Planner(captured, Bounds(MOST, 8, 24), without_graph=Fallback.GRAPHS_OFF)
        streams, recorder = self.rig.streams, self.rig.recorder
        self.capture = LiveCapture(self.rig.tower, self.rig.graphs, streams, recorder, lambda ladder: ladder, 1 << 20)
        self.learner = LadderLearner(
            self.capture, self.planner, self.demands, default, self.metrics.ladder,
            keep=self.file.write, learned=learned, clock=self.clock,
        )  # fmt: skip

    def ladder(self, sizes: tuple[int, ...]) -> Ladder:
        return Ladder(tuple(sorted(self.demands.budget(size) for size in sizes)))

    def sizes(self) -> list[int]:
        return [budget.tokens for budget in self.planner.ladder]

    def plan(self, tokens: int, times: int) -> int:
        """Plan single images of so many tokens, until the ladder changes; returns their number."""
        window = [Footprint(4 * tokens, tokens, 1, 4 * tokens)]
        for count in range(times):
            self.learner.planned(window, 1)
            self.clock.now += 100.0
            if self.finish():
                return count + 1
        return times

    def finish(self) -> bool:
        """Wait for a fit, and do the steps of a change."""
        self.learner._worker.submit(int).result()
        changed = False
        while (seconds := self.learner.seconds_until_due(idle=False)) < inf:
            self.clock.now += seconds
            if planner := self.learner.step():
                self.planner, changed = planner, True
                self.learner.replaced()
            self.learner._worker.submit(int).result()
        return changed

    def refits(self, result: str) -> float:
        value = self.metrics.registry.get_sample_value("vitwire_ladder_refits_total", {"result": result})
        assert value is not None
        return value


@pytest.fixture
def made(checkpoints: Callable[[str], Path], tmp_path: Path, device: torch.device) -> Iterator[Learning]:
    learning = Learning(checkpoints("qwen2_vl"), tmp_path, device)
    yield learning
    learning.learner.stop()


def test_it_follows_the_loads_and_a_restart_begins_there(
    made: Learning, checkpoints: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ladders: list[Ladder] = []
    made.learner.on_change = ladders.append
    assert made.plan(96, 1024) <= 512
    assert made.sizes() == [96, 320, 640]
    assert [budget.tokens for budget in made.rig.graphs.ladder] == made.sizes()
    assert "learned ladder of 3 budgets in use, 1 of them captured" in caplog.text
    assert "padding 0.0 instead of 40.0 %" in caplog.text
    assert made.plan(200, 2048) < 2048
    assert {200, 640} < set(made.sizes())
    assert ladders[-1] == made.planner.ladder
    assert made.refits("swapped") == len(ladders) == 2
    assert made.metrics.registry.get_sample_value("vitwire_ladder_budgets", {"budget": "160"}) == 0
    again = Learning(checkpoints("qwen2_vl"), tmp_path, made.rig.tower.device)
    assert again.sizes() == made.sizes()
    assert again.plan(200, 1024) == 1024, "it knows these loads"


def load(made: Learning) -> None:
    """As many items of 96 tokens as a fit is made of."""
    for _ in range(learning._FIT_EVERY):
        made.learner.planned([Footprint(384, 96, 1, 384)], 1)
    made.learner._worker.submit(int).result()


def test_steps_wait_a_second_for_the_engine_to_be_idle(made: Learning) -> None:
    load(made)
    assert made.learner.seconds_until_due(idle=False) == 0, "a fit has ended"
    assert made.learner.step() is None
    assert 96 not in [budget.tokens for budget in made.rig.graphs.ladder]
    assert made.learner.seconds_until_due(idle=True) == 0
    assert made.learner.seconds_until_due(idle=False) == pytest.approx(1.0)
    made.clock.now += 1.0
    assert made.learner.seconds_until_due(idle=False) == 0
    assert made.learner.step() is None
    assert 96 in [budget.tokens for budget in made.rig.graphs.ladder], "captured whole"


def test_a_fit_begins_a_minute_after_the_last_one(made: Learning) -> None:
    load(made)
    assert made.finish()
    for seconds, due in ((59.0, inf), (60.0, 0.0)):
        made.clock.now = seconds
        load(made)
        assert made.learner.seconds_until_due(idle=False) == due


def test_failed_captures_keep_the_ladder_and_end_the_learning(
    made: Learning, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> Callable[[], None]:
        raise RuntimeError("injected")

    monkeypatch.setattr(made.rig.recorder, "capture", fail)
    assert made.plan(96, 4096) == 4096
    assert made.sizes() == [budget.tokens for budget in made.rig.graphs.ladder] == list(DEFAULT)
    assert (made.refits("failed"), made.refits("swapped")) == (3, 0)
    assert caplog.text.count("and the old one stays in use") == 3
    assert "no other is tried: budget of 96 tokens: injected" in caplog.text
    assert made.file.read() is None


def test_a_change_ends_with_the_server(made: Learning) -> None:
    load(made)
    assert made.learner.step() is None
    assert made.learner.seconds_until_due(idle=True) == 0
    made.learner.stop()
    assert made.learner.seconds_until_due(idle=True) == inf
    assert made.plan(96, 1024) == 1024


def test_memory_beyond_the_bound_is_a_failure(made: Learning, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([0, 2 << 20, 2 << 20, 0] * 9)  # before and after a capture, and while it is given up
    monkeypatch.setattr(LiveCapture, "reserved", lambda _: next(taken))
    assert made.plan(96, 4096) == 4096
    assert made.sizes() == list(DEFAULT)
    assert (made.refits("failed"), made.capture.grown) == (3, 0)


def test_a_ladder_that_is_measured_to_be_slower_waits_for_a_restart(
    made: Learning, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)

    def slow(self: LiveCapture, budget: Budget, on: Budget, predicted: float) -> float:
        return 1.0

    monkeypatch.setattr(LiveCapture, "timed", slow)
    assert made.plan(96, 512) < 512
    assert made.sizes() == [budget.tokens for budget in made.rig.graphs.ladder] == list(DEFAULT)
    assert "measured to be slower than the old one" in caplog.text
    assert made.refits("swapped") == 0
    made.learner._worker.submit(int).result()
    kept = made.file.read()
    assert kept
    assert 96 in kept.sizes
    assert made.planner.costs.measured == {96: 1.0}, "the next fit knows"


def test_a_bug_in_a_fit_ends_the_learning_only(
    made: Learning, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "propose", lambda *_: 1 / 0)
    assert made.plan(96, 1024) == 1024
    assert caplog.text.count("no ladder is learned any more") == 1
    assert made.sizes() == list(DEFAULT)


def test_a_bug_in_a_judgement_keeps_the_ladder(
    made: Learning, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "gain", lambda *_: 1 / 0)
    assert made.plan(96, 4096) == 4096
    assert made.sizes() == [budget.tokens for budget in made.rig.graphs.ladder] == list(DEFAULT)
    assert made.refits("failed") == 3
    assert "the new ladder could not be judged: ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("faster", [True, False, None])
def test_new_budgets_get_others_for_short_segments_where_those_are_faster(
    faster: bool | None, made: Learning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: nothing is timed, as on the host."""

    def timed(self: LiveCapture, budget: Budget, on: Budget, predicted: float) -> float | None:
        return None if faster is None else 1.8e-3 if faster and on.max_segment_patches == 64 else 2e-3

    if faster is not None:
        costs = replace(ASSUMED, measured={size: 1e-5 * size for size in DEFAULT})
        made.planner = made.learner._planner = made.planner.changed(made.planner.ladder, costs)
    made.capture.completed = lambda ladder: with_shorter(ladder, lambda _: [64], merge=2)
    monkeypatch.setattr(LiveCapture, "timed", timed)
    assert made.plan(200, 2048) < 2048
    assert made.planner.ladder == made.rig.graphs.ladder
    short = [budget for budget in made.planner.ladder if budget.max_segment_patches == 64]
    assert [budget.tokens for budget in short] == ([200] if faster else [])
    window = [Footprint(128, 32, 2, 64)] * 6
    (batch,) = made.planner.plan(window).batches
    assert batch.budget == (short[0] if short else made.demands.budget(200))
