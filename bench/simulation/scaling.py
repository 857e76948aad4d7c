"""An autoscaler of a simulated fleet, by the rules of deploy/components/hpa, and load that doubles at once."""

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import simpy
from bench.simulation.fleet import Fleet
from bench.simulation.load import Images

Row = dict[str, Any]
_TARGET_ITEMS = 64
"""Items that wait in each replica, as in deploy/components/hpa."""
_TOLERANCE = 1.1
_PERIOD = 15.0
"""Between decisions. Metrics are half as old on average."""
_DOUBLING_PERIODS = 4
"""At most twice as many replicas in a minute."""
_MOST = 4
"""Maximum replicas, as a multiple of those at the start."""
_STEP = 30.0
_AFTER = 75.0
"""Seconds that are simulated beyond the first replica that can help."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Load that doubles at once, and what then takes time."""

    name: str
    pod_seconds: float = 0.0
    """From the decision until a process starts: scheduling, a node, the image, the model."""
    load: float = 0.7
    """Before it doubles, as a share of the capacity without hits."""
    cached: bool = False
    cold: bool = False
    """Whether caches of new replicas are empty; else they are as full as the others."""


SCENARIOS = (
    Scenario("spare replicas: from 0.35 to 0.7", load=0.35),
    Scenario("ready in 16 s"),
    Scenario("ready in 16 s, caches filled beforehand", cached=True, load=0.9),
    Scenario("ready in 16 s, caches empty", cached=True, cold=True, load=0.9),
    Scenario("pod in 1 min, ready in 16 s", pod_seconds=60),
    Scenario("pod in 3 min, ready in 16 s", pod_seconds=180),
)


def autoscale(fleet: Fleet, pod_seconds: float) -> Generator[simpy.Event, None, None]:
    """A HorizontalPodAutoscaler by queue depth, which counts pods that are not ready as empty."""
    first = len(fleet.replicas)
    counts = [first] * _DOUBLING_PERIODS
    while True:
        yield fleet.env.timeout(_PERIOD / 2)
        queued = sum(len(each.queue) for each in fleet.live)
        yield fleet.env.timeout(_PERIOD / 2)
        count = len(fleet.replicas)
        wanted = count
        if queued > _TOLERANCE * _TARGET_ITEMS * count:
            wanted = min(math.ceil(queued / _TARGET_ITEMS), 2 * counts[-_DOUBLING_PERIODS], _MOST * first)
        for _ in range(wanted - count):
            fleet.add(pod_seconds + fleet.costs.ready_seconds)
        counts.append(max(wanted, count))


def doubled(
    tokens: Sequence[int], scenario: Scenario, count: int, cache_bytes: float, aim: float, seed: int
) -> tuple[Row, Fleet]:
    """How long more than 1 % of the requests exceed an aim (seconds) after the load has doubled."""
    images = Images(tokens, 0.5 if scenario.cached else 0.0, seed)
    fleet = Fleet(
        count,
        "bounded_hash" if scenario.cached else "least_request",
        cache_bytes=cache_bytes * scenario.cached,
        seed=seed,
    )
    images.fill(fleet)
    if not scenario.cold:
        fleet.on_ready = lambda replica: images.fill(fleet, only=replica)
    base = scenario.load * fleet.costs.capacity(tokens) * count
    step = _STEP + 4 * (seed % 4)  # at another point of the autoscaler's period
    end = step + 2 * _PERIOD + scenario.pod_seconds + fleet.costs.ready_seconds + _AFTER
    fleet.tally.start = step - 10
    rate: Callable[[float], float] = lambda now: base * (2.0 if now >= step else 1.0)  # noqa: E731
    fleet.env.process(images.arrive(fleet, rate, end))
    fleet.env.process(autoscale(fleet, scenario.pod_seconds))
    fleet.env.run(until=end)
    fleet.drain()
    late = fleet.tally.late_windows(step, aim)
    row = {
        "scenario": scenario.name,
        "from": count,
        "to": len(fleet.replicas),
        "seconds_over_aim": len(late),
        "recovered_after": int(late[-1]) + 1 if len(late) else 0,
        "seconds_after_step": end - step,
    }
    return row | fleet.tally.row(end - fleet.tally.start), fleet
