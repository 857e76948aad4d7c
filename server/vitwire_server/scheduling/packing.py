"""Two ways to pack: subset sums that meet budgets exactly, and best-fit decreasing."""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from vitwire_server.core.grids import Footprint
from vitwire_server.core.items import total


class Options:
    """Every budget and every pair of budgets, cheapest first: the ways to run what is left.

    A pair of capacity t can split a sum s <= t exactly if a subset of the items sums to something
    in [s - larger, smaller]; all its padding is then t - s.
    """

    def __init__(self, sizes: Sequence[int], seconds: Callable[[int], float]) -> None:
        """`sizes` ascend; `seconds` predicts a replay of a budget of this many tokens."""
        self.largest = sizes[-1] if sizes else 0
        cost = {size: seconds(size) for size in sizes}
        options = [(cost[size], 1, size, 0) for size in sizes]
        options += [(cost[a] + cost[b], 2, b, a) for i, b in enumerate(sizes) for a in sizes[: i + 1]]
        # Of two options of equal cost, the one of fewer launches comes first.
        self.ordered = [(larger, smaller) for _, _, larger, smaller in sorted(options)]

    def split(self, tokens: int, reach: int) -> int | None:
        """Tokens that the first of one or two batches takes; None if no option holds `tokens`.

        Bit n of `reach` is set if some subset of the items sums to n.
        """
        for larger, smaller in self.ordered:
            if larger + smaller < tokens:
                continue
            if tokens <= larger:
                return tokens
            lowest = tokens - smaller
            window = (reach >> lowest) & ((1 << (larger - lowest + 1)) - 1)
            if window:
                return lowest + window.bit_length() - 1
        return None


def fill(items: Sequence[int], footprints: Sequence[Footprint], options: Options) -> list[list[int]]:
    """Groups whose tokens meet budgets as closely as subset sums allow; sees tokens only.

    While more is left than two of the largest budgets hold, the largest is filled as far as a
    subset of the items can; what is left then goes into the cheapest one or two budgets. Subset
    sums are kept as the bits of an integer (Bellman 1957, in its bitset form): adding an item is a
    shift and an or.
    """
    groups: list[list[int]] = []
    left = [(footprints[item].tokens, item) for item in items]
    left.sort(key=lambda sized: (-sized[0], sized[1]))
    within = (1 << (options.largest + 1)) - 1
    while left:
        sums = [1]
        for tokens, _ in left:
            sums.append((sums[-1] | sums[-1] << tokens) & within)
        target = options.split(sum(tokens for tokens, _ in left), sums[-1])
        if target is None:
            target = sums[-1].bit_length() - 1
        group, left = _subset(left, sums, target)
        groups.append(group)
    return groups


def _subset(
    left: Sequence[tuple[int, int]], sums: Sequence[int], target: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """Items that sum to `target`, which must be set in the last of `sums`, and the others."""
    group: list[int] = []
    others: list[tuple[int, int]] = []
    for position in range(len(left) - 1, -1, -1):
        tokens, item = left[position]
        if sums[position] >> target & 1:
            others.append((tokens, item))
        else:
            group.append(item)
            target -= tokens
    others.reverse()
    return group, others


def best_fit(
    items: Sequence[int], footprints: Sequence[Footprint], holds: Callable[[Footprint, int], bool]
) -> list[list[int]]:
    """Groups for which `holds(load, items)` is true; an item that it never holds for is alone.

    Best-fit decreasing (Johnson 1974: at most 11/9 of the fewest bins there can be): items by
    descending tokens, each into the fullest group that still takes it.
    """
    bins: list[tuple[Footprint, list[int]]] = []
    """Fullest first."""
    for item in sorted(items, key=lambda item: (-footprints[item].tokens, item)):
        load, group = footprints[item], [item]
        for position, (held, others) in enumerate(bins):
            joint = total((held, load))
            if holds(joint, len(others) + 1):
                del bins[position]
                others.append(item)
                load, group = joint, others
                break
        bins.insert(bisect_left(bins, -load.tokens, key=lambda other: -other[0].tokens), (load, group))
    return [group for _, group in bins]
