"""Costs measured at start: the host and device time of each budget's replay, and a linear fit of eager forwards."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from statistics import median

import torch

from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.costs import ASSUMED, Costs
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import DType, Item, Modality, Pixels, total
from vitwire_server.core.runner import Collected
from vitwire_server.runtime.engine import Engine
from vitwire_server.towers.tower import Tower

_REPEATS = 5
_GAIN = 0.02
"""Share of a replay that a budget for short segments saves at least."""
_MARGIN = 1.5
"""Ratio of the device's time for the replays to the launch time of an eager forward."""
_SHORTEST = 1e-3
"""A replay's seconds are counted as at least these, so that few go ahead."""
_EAGER_TOKENS = (16, 64, 256, 1024, 4096)


def sample_items(tower: Tower, grids: Sequence[Grid]) -> list[Item]:
    """Grey uint8 images of these grids."""
    geometry, output = tower.geometry, DType.of(str(tower.dtype).removeprefix("torch."))
    items = []
    for grid in grids:
        pixels, second = geometry.shapes(grid, Modality.IMAGE)[-1], geometry.crops(grid)
        crops = _grey(second) if second else None
        items.append(Item(Modality.IMAGE, grid, _grey(pixels), tower.footprint(grid), output, crops=crops))
    return items


def _grey(shape: tuple[int, ...]) -> Pixels:
    return Pixels(bytes([128]) * prod(shape), DType.UINT8, shape)


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one batch."""

    wall: float
    """From the launch on an idle engine to its rows on the host."""
    launch: float
    """From the launch until `launch` returned."""
    device: float


def measure_costs(engine: Engine, tower: Tower, ladder: Ladder, most: int, items: int) -> Costs:
    """Time each captured budget when full, and eager forwards of a few sizes up to `most` tokens.

    Both use images of 256 tokens and a remainder, or of one tile, so that attention within segments costs the same in
    both. The device's time of an eager forward is taken behind replays that keep the device busy while its kernels are
    launched, as under load; without graphs on an idle engine. The host's time is taken from the smallest
    batches: staging more depends on where their pixels are.
    """
    largest = {budget.tokens: budget for budget in ladder}  # of as many tokens the one for all segments
    replays = {
        budget: timed(engine, sample_items(tower, tower.samples_for(budget)), budget) for budget in largest.values()
    }
    batches = [sample_items(tower, tower.samples(min(size, most), items)) for size in _EAGER_TOKENS]
    sized = {sum(item.footprint.tokens for item in batch): batch for batch in batches}
    alone = {size: timed(engine, batch, None) for size, batch in sized.items()}
    eager_host = min(each.launch for each in alone.values())
    behind = _behind(engine, tower, ladder.largest, eager_host, replays)
    eager = {size: behind(batch) or alone[size].device for size, batch in sized.items()}
    replay_host = max(0.0, min((each.wall - each.device for each in replays.values()), default=0.0))
    measured = {budget.tokens: each.device for budget, each in replays.items()}
    lags = [
        _lag(engine, batch, ladder, alone[size].wall - eager[size])
        for size, batch in sized.items()
        if eager[size] > eager_host
    ]
    costs = replace(
        fit(measured, eager),
        eager_host=eager_host,
        eager_lead=replay_host + max([0.0, *lags]),
        replay_host=replay_host,
    )
    return replace(costs, saved=_saved(engine, tower, {each: largest[each.tokens] for each in ladder}))


def worthwhile(ladder: Ladder, costs: Costs) -> Ladder:
    """Without budgets for short segments that are hardly faster than those for all, and hold no more of them."""
    largest = {budget.tokens: budget for budget in ladder}
    kept = [
        budget
        for budget in ladder
        if budget is largest[budget.tokens]
        or budget.max_segments > largest[budget.tokens].max_segments
        or costs.saved.get(budget, 0.0) >= _GAIN * costs.replay_work(budget.tokens).device
    ]
    return Ladder(tuple(kept))


def _lag(engine: Engine, batch: Sequence[Item], ladder: Ladder, eagerly: float) -> float:
    """Seconds that an eager forward takes longer on an idle engine than a replay of the same items, both without their
    time on the device; `eagerly` is that of the eager forward. 0 if no budget holds them."""
    budget = ladder.smallest_fitting(total([item.footprint for item in batch]), len(batch))
    if budget is None:
        return 0.0
    replayed = timed(engine, batch, budget)
    return eagerly - (replayed.wall - replayed.device)


def _saved(engine: Engine, tower: Tower, largest: Mapping[Budget, Budget]) -> dict[Budget, float]:
    """Device seconds that budgets for short segments save against `largest` of as many tokens, on what both hold."""
    saved = {}
    for budget, all_segments in largest.items():
        if budget != all_segments:
            items = sample_items(tower, tower.samples_for(budget.within(all_segments)))
            own, others = (timed(engine, items, each).device for each in (budget, all_segments))
            saved[budget] = max(0.0, others - own)
    return saved


def fit(measured: dict[int, float], eager: dict[int, float]) -> Costs:
    """Costs with a line through the two largest eager sizes, and the fastest forward as floor: device seconds."""
    sizes = sorted(eager)
    slope = ASSUMED.eager_token
    if len(sizes) > 1:
        larger, smaller = sizes[-1], sizes[-2]
        slope = max(0.0, (eager[larger] - eager[smaller]) / (larger - smaller))
    fixed = max(0.0, eager[sizes[-1]] - slope * sizes[-1])
    floor = min(eager.values())
    return replace(ASSUMED, eager_fixed=fixed, eager_token=slope, eager_floor=floor, measured=measured)


def _behind(
    engine: Engine, tower: Tower, largest: Budget | None, host: float, replays: Mapping[Budget, Timed]
) -> Callable[[Sequence[Item]], float]:
    """Measures the device seconds of an eager forward behind replays of the largest budget; 0 without any."""
    if largest is None or engine.depth == 1:
        return lambda _: 0.0
    full = sample_items(tower, tower.samples(largest.tokens, largest.max_items))
    count = ceil(_MARGIN * host / max(replays[largest].device, _SHORTEST))

    def once(batch: Sequence[Item]) -> float:
        ahead = [engine.launch(full, largest) for _ in range(count)]
        own = engine.launch(batch, None)
        for running in ahead:
            running.collect()
        return _device(own.collect())

    return lambda batch: median(once(batch) for _ in range(_REPEATS))


def timed(engine: Engine, items: Sequence[Item], budget: Budget | None) -> Timed:
    """Medians of a batch on an idle engine, after one run that does not count."""

    def once() -> Timed:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        running = engine.launch(items, budget)
        launched = time.perf_counter()
        collected = running.collect()
        return Timed(time.perf_counter() - start, launched - start, _device(collected))

    runs = [once() for _ in range(_REPEATS + 1)][1:]
    wall, launch, device = (median(getattr(run, name) for run in runs) for name in ("wall", "launch", "device"))
    return Timed(wall, launch, device) if engine.depth > 1 else Timed(wall, 0.0, wall)  # else nothing overlaps


def _device(collected: Collected) -> float:
    return collected.timings.execute if collected.timings else 0.0
