"""Ladders fitted to loads, by exact dynamic programming, and whether one is worth its capture."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from vitwire_server.core.capacities import Capacities
from vitwire_server.core.costs import Costs
from vitwire_server.core.grids import Footprint

Floats = NDArray[np.float64]

DEPTHS: Mapping[int, float] = {1: 0.7, 4: 1.0}
"""Queue depths whose loads a ladder is fitted to, and their weights.

Deeper queues can be packed to fill any budget; a single item, or a few that fit in one replay, take the next larger
budget.
"""
LEAST_GAIN = 0.02
"""Share of the predicted time that a ladder must save."""
_UNSEEN = 0.05
"""Share of loads that are assumed to have other sizes than the recorded ones: the default ladder's."""
_EAGER_RUNS, REPLAYS = 2, 4
"""Forwards that a capture takes: to warm up and record, and to time the replay."""


def held_loads(
    trace: Sequence[Footprint], capacities: Capacities, largest: int, depths: Mapping[int, float] = DEPTHS
) -> dict[int, float]:
    """Weight of each load of one forward, from items in their order of arrival.

    The load at depth d is the sum of d consecutive items, rounded up to the smallest budget that the tower can have for
    it. Depths are weighted per token, so that the relative padding of each counts as `depths` says. Loads beyond
    `largest` are ignored.
    """
    sizes = np.array([(item.patches, item.tokens, item.crops) for item in trace])
    ends = np.concatenate([np.zeros_like(sizes[:1]), sizes.cumsum(axis=0)])
    weights: defaultdict[int, float] = defaultdict(float)
    for depth, weight in depths.items():
        sums, counts = np.unique(ends[depth:] - ends[:-depth], axis=0, return_counts=True)
        held: Counter[int] = Counter()
        for (patches, tokens, crops), count in zip(sums.tolist(), counts.tolist(), strict=True):
            needed = capacities.needed(Footprint(patches, tokens, 1, 1, crops))
            if needed and needed <= largest:
                held[needed] += count
        share = weight / max(1, sum(size * count for size, count in held.items()))
        for size, count in held.items():
            weights[size] += share * count
    return weights


def optimal_ladder(weights: Mapping[int, float], count: int, largest: int, costs: Costs) -> list[int]:
    """The at most `count` budgets, `largest` among them, that minimise the expected cost of a load.

    One-dimensional optimal quantisation (Bruce 1965): `f_k(j) = min_i f_(k-1)(i) + P(i, j]`, where
    P is the cost of serving the loads above the i-th by the budget at the j-th, or eagerly where
    that is cheaper. Budgets at the loads themselves suffice, since costs rise with tokens. Exact,
    O(count * M^2) for M distinct loads. Raises ValueError without loads or budgets.
    """
    if count < 1 or not weights:
        raise ValueError("a ladder needs at least one budget, and one load that it can serve")
    sizes = sorted({*weights, largest})
    mass = np.array([weights.get(size, 0.0) for size in sizes])
    eager = np.array([costs.eager(size) for size in sizes])
    best = np.full((count, len(sizes)), np.inf)
    previous = np.full((count, len(sizes)), -1)
    for j, size in enumerate(sizes):
        # For each i, the expected cost of the loads from the i-th on.
        served = np.cumsum((mass[: j + 1] * np.minimum(costs.replay(size), eager[: j + 1]))[::-1])[::-1]
        best[0, j] = served[0]
        if j == 0:
            continue
        candidates = best[:-1, :j] + served[1:]
        previous[1:, j] = candidates.argmin(axis=1)
        best[1:, j] = candidates.min(axis=1)
    return _budgets(sizes, best, previous)


def _budgets(sizes: Sequence[int], best: Floats, previous: NDArray[np.int64]) -> list[int]:
    """The chosen sizes, read backwards from the largest."""
    k = int(best[:, -1].argmin())
    chosen, j = [], len(sizes) - 1
    while j >= 0:
        chosen.append(sizes[j])
        j = int(previous[k, j]) if k else -1
        k -= 1
    return chosen[::-1]


def expected_seconds(weights: Mapping[int, float], ladder: Iterable[int], costs: Costs) -> float:
    """Mean predicted time of a load on a ladder, each on its cheapest budget or eagerly."""
    sizes = list(ladder)
    return sum(weight * _cheapest(load, sizes, costs)[0] for load, weight in weights.items()) / sum(weights.values())


def _cheapest(load: int, ladder: Sequence[int], costs: Costs) -> tuple[float, int]:
    """Seconds and computed tokens of a load on its cheapest budget, or eagerly."""
    return min([*((costs.replay(size), size) for size in ladder if size >= load), (costs.eager(load), load)])


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
    real = sum(load * weight for load, weight in loads.items())
    computed = sum(_cheapest(load, ladder, costs)[1] * weight for load, weight in loads.items())
    return 1 - real / computed if computed else 0.0
