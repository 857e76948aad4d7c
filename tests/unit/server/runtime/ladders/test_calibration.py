"""Costs measured on an engine whose host and device keep a clock of their own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import pytest

from broken import load
from checkpoints import Checkpoints
from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.costs import Work, end_of
from vitwire_server.core.items import Item
from vitwire_server.core.runner import Collected, Timings
from vitwire_server.runtime.ladders import calibration
from vitwire_server.towers.tower import Tower

if TYPE_CHECKING:
    from vitwire_server.runtime.engine import Engine

REPLAY_HOST, EAGER_HOST, LAG, TOKEN = 0.3e-3, 8e-3, 1.2e-3, 8e-6


@dataclass
class Machine:
    """An engine of 2 in flight: replays take 1 ms and `TOKEN` a token, eager forwards as much for what they hold."""

    depth: int = 2
    host: float = EAGER_HOST
    now: float = 0.0
    free: float = 0.0
    launched: list[Budget | None] = field(default_factory=list)

    def perf_counter(self) -> float:
        return self.now

    def launch(self, items: Sequence[Item], budget: Budget | None) -> "Batch":
        self.launched.append(budget)
        tokens = budget.tokens if budget else sum(item.footprint.tokens for item in items)
        host = REPLAY_HOST if budget else self.host
        lead = REPLAY_HOST if budget else REPLAY_HOST + LAG
        begun = max(self.now + REPLAY_HOST, self.free)
        self.free = end_of(Work(host, lead, 1e-3 + TOKEN * tokens), self.now, self.free)
        self.now += host
        return Batch(self, begun, self.free)


@dataclass
class Batch:
    machine: Machine
    begun: float
    end: float

    def collect(self) -> Collected:
        self.machine.now = max(self.machine.now, self.end)
        return Collected((), Timings(0.0, self.end - self.begun, 0.0))


@pytest.fixture(scope="module")
def tower(checkpoints: Checkpoints) -> Tower:
    return load(checkpoints("qwen3_vl")).tower


def test_the_host_and_the_device_are_told_apart(tower: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(calibration, "time", machine)
    ladder = Ladder(tuple(tower.budget(size, max_items=64, max_frames=64) for size in (16, 256, 4096)))
    costs = calibration.measure_costs(cast("Engine", machine), tower, ladder, 4096, 64)
    assert costs.eager_host == pytest.approx(EAGER_HOST)
    assert costs.replay_host == pytest.approx(REPLAY_HOST)
    assert costs.eager_lead == pytest.approx(REPLAY_HOST + LAG)
    assert dict(costs.measured) == pytest.approx({size: 1e-3 + TOKEN * size for size in (16, 256, 4096)})
    assert costs.eager_floor == pytest.approx(1e-3 + TOKEN * 16), "not the time of launching"
    assert costs.eager_token == pytest.approx(TOKEN)
    assert costs.eager(16) == pytest.approx(EAGER_HOST)
    assert costs.eager_work(4096).device == pytest.approx(1e-3 + TOKEN * 4096)


def test_without_graphs_an_eager_forward_is_timed_on_an_idle_engine(
    tower: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine()
    monkeypatch.setattr(calibration, "time", machine)
    costs = calibration.measure_costs(cast("Engine", machine), tower, Ladder(), 4096, 64)
    assert set(machine.launched) == {None}
    assert (costs.eager_host, costs.replay_host) == (pytest.approx(EAGER_HOST), 0.0)
    assert costs.eager_work(4096).device == pytest.approx(1e-3 + TOKEN * 4096 + LAG, rel=0.01)


def test_where_nothing_overlaps_all_is_the_device(tower: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(depth=1)
    monkeypatch.setattr(calibration, "time", machine)
    ladder = Ladder((tower.budget(256, max_items=64, max_frames=64),))
    costs = calibration.measure_costs(cast("Engine", machine), tower, ladder, 1024, 64)
    assert (costs.eager_host, costs.replay_host) == (0.0, 0.0)
    assert costs.measured[256] == pytest.approx(REPLAY_HOST + 1e-3 + TOKEN * 256)
    assert costs.eager(16) == pytest.approx(EAGER_HOST)


def test_a_host_slower_than_every_forward_has_no_lead_of_its_own(tower: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(host=0.1)
    monkeypatch.setattr(calibration, "time", machine)
    ladder = Ladder((tower.budget(256, max_items=64, max_frames=64),))
    costs = calibration.measure_costs(cast("Engine", machine), tower, ladder, 4096, 64)
    assert costs.eager_host == pytest.approx(0.1)
    assert costs.eager_lead == pytest.approx(REPLAY_HOST)
