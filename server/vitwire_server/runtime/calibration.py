"""Costs measured on the device: the replay of each budget, and a linear fit of eager forwards."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from statistics import median

import torch

from vitwire_server.core.budgets import Budget, Ladder
from vitwire_server.core.costs import ASSUMED, Costs
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import DType, Item, Modality, Pixels, total
from vitwire_server.runtime.engine import Engine
from vitwire_server.towers.tower import Tower

_REPEATS = 5
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


def measure_costs(engine: Engine, tower: Tower, ladder: Ladder, most: int, items: int) -> Costs:
    """Time each captured budget when full, and eager forwards of a few sizes up to `most` tokens.

    Both use images of 256 tokens and a remainder, or of one tile, so that attention within segments costs the same in
    both.
    """

    def seconds(batch: list[Item], run: Callable[[list[Item]], float]) -> float:
        run(batch)
        return median(run(batch) for _ in range(_REPEATS))

    measured = {
        budget.tokens: seconds(
            sample_items(tower, tower.samples(budget.tokens, budget.max_items)),
            lambda batch, budget=budget: _timed(engine, batch, budget),  # type: ignore[misc]
        )
        for budget in ladder
    }
    batches = [sample_items(tower, tower.samples(min(size, most), items)) for size in _EAGER_TOKENS]
    sized = {sum(item.footprint.tokens for item in batch): batch for batch in batches}
    eager = {size: seconds(batch, lambda batch: _timed(engine, batch, None)) for size, batch in sized.items()}
    alone = sample_items(tower, tower.samples(min(sized), 1))
    budget = ladder.smallest_fitting(total([item.footprint for item in alone]), len(alone))
    eagerly, replayed = (seconds(alone, lambda batch, on=on: _launched(engine, batch, on)) for on in (None, budget))  # type: ignore[misc]
    return replace(fit(measured, eager), eager_host=max(0.0, eagerly - replayed))


def fit(measured: dict[int, float], eager: dict[int, float]) -> Costs:
    """Costs with a line through the two largest eager sizes, and the fastest forward as floor."""
    sizes = sorted(eager)
    slope = ASSUMED.eager_token
    if len(sizes) > 1:
        larger, smaller = sizes[-1], sizes[-2]
        slope = max(0.0, (eager[larger] - eager[smaller]) / (larger - smaller))
    fixed = max(0.0, eager[sizes[-1]] - slope * sizes[-1])
    floor = min(eager.values())
    return replace(ASSUMED, eager_fixed=fixed, eager_token=slope, eager_floor=floor, measured=measured)


def _launched(engine: Engine, items: Sequence[Item], budget: Budget | None) -> float:
    """Seconds until a batch is launched, which is the host's part."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    running = engine.launch(items, budget)
    spent = time.perf_counter() - start
    running.collect()
    return spent


def _timed(engine: Engine, items: Sequence[Item], budget: Budget | None) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    engine.launch(items, budget).collect()
    return time.perf_counter() - start
