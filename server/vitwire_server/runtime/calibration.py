"""Costs measured on the device: each budget's replay, and a line through eager forwards."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch

from vitwire_server.core.budgets import Ladder
from vitwire_server.core.costs import ASSUMED, Costs
from vitwire_server.core.grids import Grid
from vitwire_server.core.items import DType, Item, Modality, Pixels
from vitwire_server.runtime.engine import Engine
from vitwire_server.runtime.graphs import sample_grids
from vitwire_server.towers.packed import PackedTower

_REPEATS = 5
_EAGER_TOKENS = (16, 64, 256, 1024, 4096)


def sample_items(tower: PackedTower, grids: Sequence[Grid]) -> list[Item]:
    """Images of these grids in uint8, all of the same grey."""
    columns = tower.geometry.columns(frames=1)
    return [
        Item(
            Modality.IMAGE,
            grid,
            Pixels(bytes([128]) * (grid.patches * columns), DType.UINT8, (grid.patches, columns)),
            tower.footprint(grid),
            DType.of(str(tower.dtype).removeprefix("torch.")),
        )
        for grid in grids
    ]


def measure_costs(engine: Engine, tower: PackedTower, ladder: Ladder, most: int, items: int) -> Costs:
    """Time every captured budget, full, and eager forwards of a few sizes up to `most` tokens.

    Both run on images of 256 tokens and a rest, so that attention within segments, which does not
    depend on how items are packed, weighs the same on both sides.
    """

    def seconds(tokens: int, run: Callable[[list[Item]], float]) -> float:
        batch = sample_items(tower, sample_grids(tokens, items, tower.geometry.merge))
        run(batch)
        return median(run(batch) for _ in range(_REPEATS))

    measured = {
        budget.tokens: seconds(budget.tokens, lambda batch, budget=budget: _timed(engine, batch, budget))  # type: ignore[misc]
        for budget in ladder
    }
    sizes = sorted({min(size, most) for size in _EAGER_TOKENS})
    eager = {size: seconds(size, lambda batch: _timed(engine, batch, None)) for size in sizes}
    return fit(measured, eager)


def fit(measured: dict[int, float], eager: dict[int, float]) -> Costs:
    """A line through the two largest eager sizes, above a floor: the fastest forward of all."""
    sizes = sorted(eager)
    slope = ASSUMED.eager_token
    if len(sizes) > 1:
        larger, smaller = sizes[-1], sizes[-2]
        slope = max(0.0, (eager[larger] - eager[smaller]) / (larger - smaller))
    fixed = max(0.0, eager[sizes[-1]] - slope * sizes[-1])
    floor = min(eager.values())
    return replace(ASSUMED, eager_fixed=fixed, eager_token=slope, eager_floor=floor, measured=measured)


def _timed(engine: Engine, items: Sequence[Item], budget: object) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    engine.launch(items, budget).collect()  # type: ignore[arg-type]
    return time.perf_counter() - start
