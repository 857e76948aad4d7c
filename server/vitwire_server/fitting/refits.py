"""Whether another ladder would serve a histogram of loads so much better that it is worth its capture."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from vitwire_server.core.costs import Costs
from vitwire_server.fitting.ladders import expected_seconds, optimal_ladder

LEAST_GAIN = 0.02
"""Share of the predicted time that a ladder must save."""
_UNSEEN = 0.05
"""Share of loads that are assumed to have other sizes than the recorded ones: those of the default ladder."""
_EAGER_RUNS, REPLAYS = 2, 4
"""Forwards that a capture takes: to warm up and record, and to time the replay."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A ladder, and what it is predicted to bring."""

    sizes: tuple[int, ...]
    is_default: bool
    gain: float
    """Share of the predicted time that it saves."""
    padding_before: float
    padding: float
    """Shares of the computed tokens, if the loads came alone."""


@dataclass(frozen=True, slots=True)
class Learned:
    """A ladder and the histogram behind it, which a restart begins with."""

    sizes: tuple[int, ...]
    loads: Mapping[int, float]


def propose(
    loads: Mapping[int, float], current: Sequence[int], default: Sequence[int], costs: Costs, served: int
) -> Proposal | None:
    """The best ladder for `loads`, or None if the current one is as good or the gain is not worth the capture.

    It has at most as many budgets as the default one, and is never predicted to be slower. It is worth its capture if
    it would have saved as much time on the `served` loads since the last change as its capture takes: so however the
    loads change, captures take no more time than they could have saved.
    """
    loads = {size: weight for size, weight in loads.items() if size <= max(default)}
    if not loads:
        return None
    costs = interpolated(costs, {*loads, *current, *default})
    fitted = optimal_ladder(with_unseen(loads, default), len(default), max(default), costs)
    seconds, best = min((expected_seconds(loads, sizes, costs), sizes) for sizes in (fitted, list(default)))
    before = expected_seconds(loads, current, costs)
    saved = 1 - seconds / before
    if saved < LEAST_GAIN or (before - seconds) * served < capture_seconds(set(best) - set(current), costs):
        return None
    return Proposal(
        tuple(best), best == list(default), saved, padding(loads, current, costs), padding(loads, best, costs)
    )


def gain(loads: Mapping[int, float], current: Sequence[int], sizes: Sequence[int], costs: Costs) -> float:
    """Share of the predicted time that a ladder saves; negative if it is slower than the current one."""
    costs = interpolated(costs, {*loads, *current, *sizes})
    return 1 - expected_seconds(loads, sizes, costs) / expected_seconds(loads, current, costs)


def with_unseen(loads: Mapping[int, float], default: Sequence[int]) -> dict[int, float]:
    """The loads and a few of other sizes, so that a size that comes up later has a budget nearby."""
    each = _UNSEEN * sum(loads.values()) / len(default)
    return {size: loads.get(size, 0.0) + (each if size in default else 0.0) for size in {*loads, *default}}


def interpolated(costs: Costs, sizes: Iterable[int]) -> Costs:
    """Costs with a replay of each of `sizes`: as measured, or on a line between measured neighbours.

    A budget costs at most as much as a larger one, which could take its place.
    """
    if not costs.measured:
        return costs
    known = sorted(costs.measured)
    seconds = np.minimum.accumulate([costs.measured[size] for size in reversed(known)])[::-1]
    wanted = sorted({*sizes, *known})
    between = zip(wanted, np.interp(wanted, known, seconds).tolist(), strict=True)
    return replace(costs, measured=MappingProxyType(dict(between)))


def capture_seconds(sizes: Iterable[int], costs: Costs) -> float:
    """Predicted time to capture budgets of these sizes and to time them."""
    return sum(_EAGER_RUNS * costs.eager(size) + REPLAYS * costs.replay(size) for size in sizes)


def padding(loads: Mapping[int, float], ladder: Sequence[int], costs: Costs) -> float:
    """Share of padding among computed tokens if each load ran on its cheapest budget or eagerly."""
    real = computed = 0.0
    for load, weight in loads.items():
        options = [(costs.replay(size), size) for size in ladder if size >= load]
        _, size = min([*options, (costs.eager(load), load)])
        real += weight * load
        computed += weight * size
    return 1 - real / computed if computed else 0.0
