"""The packing that others use, to compare with: ascending and greedy, on budgets that double.

Written from the published description of vLLM's encoder graphs (its pull requests 35963 and 38061):
items sorted by output tokens, packed greedily up to the largest budget and the item limit, each batch
replayed on the smallest budget that holds it; what exceeds every budget runs eagerly, alone.
"""

from collections.abc import Sequence

from vitwire_server.core.budgets import Ladder
from vitwire_server.core.grids import Footprint
from vitwire_server.core.items import total
from vitwire_server.core.plans import Batch, Fallback, Plan


def plan_ascending(footprints: Sequence[Footprint], ladder: Ladder, max_items: int) -> Plan:
    """Batches of `footprints` as the reference makes them. `ladder` must not be empty."""
    if ladder.largest is None:
        raise ValueError("the reference needs a budget")
    batches: list[Batch] = []
    group: list[int] = []
    tokens = 0
    for item in sorted(range(len(footprints)), key=lambda i: footprints[i].tokens):
        size = footprints[item].tokens
        if size > ladder.largest.tokens:
            batches.append(Batch((item,), None, Fallback.OVERSIZE))
            continue
        if group and (tokens + size > ladder.largest.tokens or len(group) == max_items):
            batches.append(_batch(group, footprints, ladder))
            group, tokens = [], 0
        group.append(item)
        tokens += size
    if group:
        batches.append(_batch(group, footprints, ladder))
    return Plan(tuple(batches))


def _batch(group: Sequence[int], footprints: Sequence[Footprint], ladder: Ladder) -> Batch:
    load = total([footprints[item] for item in group])
    budget = next((budget for budget in ladder if budget.tokens >= load.tokens), None)
    return Batch(tuple(group), budget, None if budget else Fallback.OVERSIZE)
