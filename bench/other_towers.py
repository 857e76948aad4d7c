"""Loads of towers of other makers than Qwen: one image, and as many as their batch has."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from bench.floor import Ceilings, counted_flop
from bench.models import item
from bench.random_towers import OtherTower, RandomTower
from bench.stopwatch import FAILURES, Stopwatch
from bench.tower_times import COLUMNS, TowerLoad
from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.core.items import Modality
from vitwire_server.core.models import TileGeometry
from vitwire_server.towers.tower import Tower


def other_loads(
    name: str, other: OtherTower, built: RandomTower, ceilings: Ceilings, stopwatch: Stopwatch
) -> list[TowerLoad]:
    """Images of one size."""
    tower, most = built.tower, other.batch
    shape = tower.geometry.shapes(other.grid, Modality.IMAGE)[0]
    pixels = [torch.randn(shape, dtype=tower.dtype, device=tower.device) for _ in range(most)]
    items = [item(tower, other.grid, own) for own in pixels]
    floor = _floor(name, other, built, pixels[:1], ceilings, stopwatch)
    loads = []
    for count in (1, most):
        row = {"tower": name, "load": f"{count} x {_size(tower, other.grid)}", "rows": count * items[0].rows}
        row |= {**dict.fromkeys(COLUMNS), "floor": floor(count)}
        plain = torch.inference_mode()(other.plain(built.model, pixels[:count], [other.grid] * count))
        loads.append(TowerLoad(row, items[:count], plain))
    return loads


def _floor(
    name: str,
    other: OtherTower,
    built: RandomTower,
    pixels: Sequence[Tensor],
    ceilings: Ceilings,
    stopwatch: Stopwatch,
) -> Callable[[int], float | None]:
    """Milliseconds by the number of images: the least work that either forward does for one of them alone."""
    ours = partial(_forward, built.tower, other, pixels[0])
    try:
        flop = min(counted_flop(forward) for forward in (other.plain(built.model, pixels, [other.grid]), ours))
    except FAILURES as error:
        stopwatch.failed(f"{name} floor", error)
        return lambda _: None
    reading = built.weights_nbytes / ceilings.bytes_per_second
    return lambda images: round(1e3 * max(images * flop / ceilings.flops, reading), 3)


def _size(tower: Tower, grid: Grid) -> str:
    """Pixels of an image, which is square or of several square tiles."""
    geometry = tower.geometry
    if not isinstance(geometry, TileGeometry):
        return f"{grid.h * geometry.patch}^2"
    tile = f"{geometry.tile[0]}^2"
    return tile if grid.t == 1 else f"{grid.t} tiles of {tile}"


def _forward(tower: Tower, other: OtherTower, pixels: Tensor) -> Tensor:
    """The tower's own forward of one image, before any backend of attention is chosen."""
    metadata = tower.reserve(tower.exact([other.grid]))
    tower.prepare([other.grid], metadata)
    return tower.forward(pixels.flatten(1), metadata)
