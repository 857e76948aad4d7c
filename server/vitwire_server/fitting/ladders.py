"""Ladders fitted to recorded items: optimal quantisation of loads by exact dynamic programming."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from vitwire_server.core.capacities import Capacities
from vitwire_server.core.costs import Costs
from vitwire_server.core.grids import Footprint

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

DEPTHS: Mapping[int, float] = {1: 0.7, 4: 1.0}
"""Queue depths whose loads a ladder is fitted to, and their weights.

Deeper queues can be packed to fill any budget; a single item, or a few that fit in one replay, take the next larger
budget.
"""


def loads(tokens: Sequence[int], largest: int, depths: Mapping[int, float] = DEPTHS) -> dict[int, float]:
    """Weight of each load of one forward, from item sizes in their order of arrival.

    The load at depth d is the sum of d consecutive items. Depths are weighted per token, so that
    the relative padding of each counts as `depths` says. Loads beyond `largest` are ignored.
    """
    return _weighed(lambda depth: _sums(tokens, depth), largest, depths)


def held_loads(
    trace: Sequence[Footprint], capacities: Capacities, largest: int, depths: Mapping[int, float] = DEPTHS
) -> dict[int, float]:
    """`loads` of a trace, each rounded up to the smallest budget that the tower can have for it."""
    columns = [[item.patches for item in trace], [item.tokens for item in trace], [item.crops for item in trace]]

    def held(depth: int) -> Integers:
        sums, positions = np.unique(
            np.stack([_sums(column, depth) for column in columns], axis=1), axis=0, return_inverse=True
        )
        loads = (Footprint(patches, tokens, 1, 1, crops) for patches, tokens, crops in sums.tolist())
        needed: Integers = np.array([capacities.needed(load) or largest + 1 for load in loads], dtype=np.int64)
        return needed[positions.reshape(-1)]

    return _weighed(held, largest, depths)


def _sums(column: Sequence[int], depth: int) -> Integers:
    """Sums of `depth` consecutive numbers."""
    ends = np.concatenate([[0], np.cumsum(np.asarray(column, dtype=np.int64))])
    return np.asarray(ends[depth:] - ends[:-depth], dtype=np.int64)


def _weighed(sums_at: Callable[[int], Integers], largest: int, depths: Mapping[int, float]) -> dict[int, float]:
    weights: dict[int, float] = {}
    for depth, weight in depths.items():
        sums = sums_at(depth)
        values, counts = np.unique(sums[(sums > 0) & (sums <= largest)], return_counts=True)
        share = weight / max(1, int((values * counts).sum()))
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            weights[value] = weights.get(value, 0.0) + share * count
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
        served = _served_from(mass[: j + 1], np.minimum(costs.replay(size), eager[: j + 1]))
        best[0, j] = served[0]
        if j == 0:
            continue
        candidates = best[:-1, :j] + served[1:]
        previous[1:, j] = candidates.argmin(axis=1)
        best[1:, j] = candidates.min(axis=1)
    return _budgets(sizes, best, previous)


def _served_from(mass: Floats, cost: Floats) -> Floats:
    """For each i, the expected cost of the loads from the i-th on."""
    total: Floats = np.cumsum((mass * cost)[::-1])[::-1]
    return total


def _budgets(sizes: Sequence[int], best: Floats, previous: NDArray[np.int64]) -> list[int]:
    """The chosen sizes, read backwards from the largest."""
    k = int(best[:, -1].argmin())
    chosen, j = [], len(sizes) - 1
    while j >= 0:
        chosen.append(sizes[j])
        j = int(previous[k, j]) if k else -1
        k -= 1
    return chosen[::-1]


def powers_of_two(largest: int, smallest: int = 64) -> list[int]:
    """The reference ladder: budgets that double from `smallest` to `largest`."""
    sizes = [min(smallest, largest)]
    while sizes[-1] < largest:
        sizes.append(min(2 * sizes[-1], largest))
    return sizes


def expected_seconds(weights: Mapping[int, float], ladder: Iterable[int], costs: Costs) -> float:
    """Mean predicted time of a load on a ladder, each on its cheapest budget or eagerly."""
    sizes = sorted(ladder)
    spent = 0.0
    for load, weight in weights.items():
        replays = [costs.replay(size) for size in sizes if size >= load]
        spent += weight * min([*replays, costs.eager(load)])
    return spent / sum(weights.values())
