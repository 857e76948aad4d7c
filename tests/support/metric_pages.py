"""What a page of metrics must be, of a server or a router."""

from collections import defaultdict
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families

FINEST, COARSEST, STEP = 0.0005, 10, 2.5


def durations(page: str) -> set[str]:
    """Names of the histograms of durations that have series; each resolves 0.5 ms to 10 s in steps of at most 2.5."""
    found: defaultdict[str, set[float]] = defaultdict(set)
    for family in text_string_to_metric_families(page):
        if family.type == "histogram" and "seconds" in family.name:
            assert family.name.endswith("_seconds"), family.name
            found[family.name] |= {float(each.labels["le"]) for each in family.samples if "le" in each.labels}
    bounded = {name: sorted(bounds) for name, bounds in found.items() if bounds}
    for name, bounds in bounded.items():
        assert bounds[0] == FINEST, name
        assert COARSEST in bounds, name
        assert all(after <= before * STEP for before, after in pairwise(bounds) if after <= COARSEST), name
    return set(bounded)
