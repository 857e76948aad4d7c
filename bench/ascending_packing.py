"""The packing that `make bench` compares with: ascending and greedy, on budgets that double.

Written from the published description of vLLM's encoder graphs (its pull requests 35963 and 38061):
items sorted by output tokens, packed greedily up to the largest budget and the item limit, each batch
replayed on the smallest budget that fits; items larger than every budget run eagerly, alone.
"""

from collections.abc import Sequence

from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.grids import Footprint
from vitwire_server.core.items import total
from vitwire_server.core.plans import Batch, Fallback, Plan


def powers_of_two(largest: int, smallest: int = 64) -> list[int]:
    """The reference ladder: budgets that double from `smallest` to `largest`."""
    sizes = [min(smallest, largest)]
    while sizes[-1] < largest:
        sizes.append(min(2 * sizes[-1], largest))
    return sizes


def plan_ascending(footprints: Sequence[Footprint], ladder: Ladder, max_items: int) -> Plan:
    """The reference's batches of `footprints`. `ladder` must not be empty."""
    if ladder.largest is None:
        raise ValueError("the reference packing needs at least one budget")
    largest, cropped = ladder.largest.tokens, any(footprint.crops for footprint in footprints)
    batches: list[Batch] = []
    group: list[int] = []
    tokens = 0
    for item in sorted(range(len(footprints)), key=lambda i: footprints[i].tokens):
        size = footprints[item].tokens
        if size > largest or (cropped and _smallest([item], footprints, ladder) is None):
            batches.append(Batch((item,), None, Fallback.OVERSIZE))
            continue
        full = tokens + size > largest or len(group) == max_items
        if group and (full or (cropped and _smallest([*group, item], footprints, ladder) is None)):
            batches.append(Batch(tuple(group), _smallest(group, footprints, ladder)))
            group, tokens = [], 0
        group.append(item)
        tokens += size
    if group:
        batches.append(Batch(tuple(group), _smallest(group, footprints, ladder)))
    return Plan(tuple(batches))


def _smallest(group: Sequence[int], footprints: Sequence[Footprint], ladder: Ladder) -> Budget | None:
    """The smallest budget of enough tokens, and of enough overviews and crops if items have crops."""
    load = total([footprints[item] for item in group])
    return next(
        (
            budget
            for budget in ladder
            if load.tokens <= budget.tokens and (not load.crops or budget.fits(load, len(group)))
        ),
        None,
    )
