"""Predicted times, with which the planner chooses between replays and eager forwards.

Batches share a host and a device: the host launches one while the device computes another.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from vitwire_server.core.budgets import Budget
from vitwire_server.core.grids import Footprint


class Work(NamedTuple):
    """Time of host and device that one batch takes."""

    host: float
    """Seconds that the host is busy with staging and launching."""
    lead: float
    """Seconds of the host before the device can start."""
    device: float
    """Seconds of the device, once it is free."""

    @property
    def alone(self) -> float:
        """Seconds from an idle engine to the result."""
        return max(self.host, self.lead + self.device)

    def scaled(self, factor: float) -> "Work":
        """The same at another pace."""
        return Work(factor * self.host, factor * self.lead, factor * self.device)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a forward as a function of its tokens, on the host and on the device.

    Attention within segments is not included, as it does not depend on packing. On the device, a replay costs the
    measured time of its budget, or else the linear prediction; an eager forward costs a linear prediction, but at
    least `eager_floor`. The host's part does not depend on tokens.
    """

    replay_fixed: float
    replay_token: float
    eager_fixed: float
    eager_token: float
    eager_floor: float
    eager_host: float = 0.0
    """Seconds that launching an eager forward's kernels from Python keeps the host busy, staging included."""
    replay_host: float = 0.0
    """Seconds of the host for any batch: staging, the launch of a replay, and collecting rows."""
    eager_lead: float = 0.0
    """Seconds by which the device lags behind an eager forward's launch if it was idle: at first each kernel waits for
    the host."""
    measured: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """Device seconds of a replay by the budget's tokens, timed right after capture."""
    attention_pair: float = 1e-8
    """Seconds that attention takes for a pair of patches, at most: a large tower on a slow device."""
    saved: Mapping[Budget, float] = field(default_factory=lambda: MappingProxyType({}))
    """Device seconds that a budget for short segments saves against the one for all segments, of as many tokens."""

    def replay_work(self, tokens: int, saved: float = 0.0) -> Work:
        """Host and device seconds of one replay of the budget of `tokens`."""
        measured = self.measured.get(tokens)
        device = self.replay_fixed + self.replay_token * tokens if measured is None else measured
        return Work(self.replay_host, self.replay_host, device - saved)

    def eager_work(self, tokens: int) -> Work:
        """Host and device seconds of one eager forward of `tokens` at the exact shape."""
        device = max(self.eager_floor, self.eager_fixed + self.eager_token * tokens)
        lead = max(self.eager_lead, self.replay_host)
        return Work(max(self.eager_host, lead), lead, device)

    def work(self, budget: Budget | None, tokens: int) -> Work:
        """Host and device seconds of a batch of `tokens`; None runs eagerly."""
        if budget is None:
            return self.eager_work(tokens)
        return self.replay_work(budget.tokens, self.saved.get(budget, 0.0) if self.saved else 0.0)

    def replay(self, tokens: int) -> float:
        """Seconds of one replay of the budget of `tokens` on an idle engine."""
        return self.replay_work(tokens).alone

    def eager(self, tokens: int) -> float:
        """Seconds of one eager forward of `tokens` at the exact shape on an idle engine."""
        return self.eager_work(tokens).alone

    def attention(self, footprints: Sequence[Footprint]) -> float:
        """Seconds that attention within segments adds, at most; neither `replay` nor `eager` counts it."""
        return self.attention_pair * sum(footprint.patches * footprint.longest for footprint in footprints)


class Timeline:
    """Batches in the order of their launch, at most `depth` of them in flight."""

    def __init__(self, depth: int = 2) -> None:
        self._host = self.end = 0.0
        self._ends: deque[float] = deque(maxlen=depth)

    @property
    def next_launch(self) -> float:
        """When the host can launch another batch."""
        full = len(self._ends) == self._ends.maxlen
        return max(self._host, self._ends[0]) if full else self._host

    @property
    def backlog(self) -> float:
        """Seconds that the device is still busy when the host can launch another batch."""
        return max(0.0, self.end - self.next_launch)

    def run(self, work: Work) -> None:
        """Launch a batch as soon as possible."""
        start = self.next_launch
        self._host = start + work.host
        self.end = end_of(work, start, self.end)
        self._ends.append(self.end)


def end_of(work: Work, start: float, device_free: float) -> float:
    """When a batch is done that the host begins to launch at `start`."""
    return max(start + work.host, max(start + work.lead, device_free) + work.device)


def together(works: Iterable[Work], backlog: float = 0.0) -> float:
    """About the seconds until all of `works` are done, in any order, on a device that is busy for `backlog` seconds."""
    host = device = lead = 0.0
    for work in works:
        host += work.host
        device += work.device
        lead = max(lead, work.lead)
    return max(host, max(backlog, lead) + device)


ASSUMED = Costs(
    replay_fixed=1.5e-3,
    replay_token=8.3e-6,
    eager_fixed=1.5e-3,
    eager_token=8.3e-6,
    eager_floor=1.7e-3,
    eager_host=8.1e-3,
    replay_host=0.5e-3,
    eager_lead=1.5e-3,
)
"""Defaults without measurements: fitted to Qwen3-VL-8B's tower on an H200 (docs/performance/cpu.md).

A replay took 1.9 ms for 49 tokens and 14.6 ms for 1568 on the device, an eager forward behind others as much, and
15.4 ms for 1568 on an idle device. Launching the kernels of an eager forward holds the host for 7 to 11 ms; its part of
a replay, collecting rows included, is at most half a millisecond.
"""

ASSUMED_ON_HOST = replace(
    ASSUMED,
    replay_fixed=2.0e-3,
    eager_fixed=3.0e-3,
    eager_floor=8.1e-3,
    eager_host=0.0,
    eager_lead=0.0,
    replay_host=0.0,
    attention_pair=5e-6,
)
"""The same if the CPU computes, so that nothing overlaps. Simulated graphs use it too: measured on a CPU, padding
would never pay."""
