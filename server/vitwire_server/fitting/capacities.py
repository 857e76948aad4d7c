"""The kind of budgets that fit the tower of a trace, inferred from footprints."""

from collections.abc import Sequence
from math import ceil

from vitwire_server.core.capacities import Capacities, CropCapacities, PackedCapacities, TileCapacities
from vitwire_server.core.grids import Footprint
from vitwire_server.fitting.traces import TraceError


def capacities_of(trace: Sequence[Footprint]) -> Capacities:
    """The capacities of a tower with these footprints. Raises TraceError if no kind of tower fits.

    The segments of a packed item have all its patches; a tile is one row, however many patches its segment has.
    """
    if all(item.segments * item.longest == item.patches for item in trace):
        merge = max(-(-item.patches // item.tokens) for item in trace)
        return PackedCapacities(ceil(merge**0.5))
    longest = trace[0].longest
    if all(item.longest == longest for item in trace):
        found = _tiles(trace, longest) or _crops(trace, longest)
        if found:
            return found
    raise TraceError("the trace has items of several models: fit one model at a time")


def _tiles(trace: Sequence[Footprint], longest: int) -> TileCapacities | None:
    """Tile towers: every tile is a segment with the same number of tokens."""
    tile = trace[0].tokens // trace[0].patches
    paired = any(item.crops for item in trace)
    alike = (item.segments == item.patches and item.tokens == tile * item.patches for item in trace)
    pairs = (item.crops == (item.patches if paired else 0) for item in trace)
    return TileCapacities(tile, longest, paired) if all(alike) and all(pairs) else None


def _crops(trace: Sequence[Footprint], longest: int) -> CropCapacities | None:
    """Where an item has one overview and any number of crops, whose tokens follow from two items that differ in them.

    Where none do, an overview and a crop are taken to have as many tokens each.
    """
    fewest, most = (choose(trace, key=lambda item: item.crops) for choose in (min, max))
    between = most.crops - fewest.crops
    crop = (most.tokens - fewest.tokens) // between if between else most.tokens // (1 + most.crops)
    overview = fewest.tokens - fewest.crops * crop
    alike = (
        item.patches == 1 and item.segments == 1 + item.crops and item.tokens == overview + crop * item.crops
        for item in trace
    )
    return CropCapacities(overview, crop, longest) if overview > 0 and crop > 0 and all(alike) else None
