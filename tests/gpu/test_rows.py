"""Rows of the table whose forwards are not stock, or take tiles: captured, right, and free of waiting."""

from collections.abc import Callable

import pytest
import torch

from rigs import Rig, Yardstick, rows_of
from vitwire_server.core.geometries import MarginGeometry
from vitwire_server.core.grids import Grid
from vitwire_server.core.models import TileGeometry
from vitwire_server.towers.layouts.packed import PackedFamily
from vitwire_server.towers.registry import FAMILIES

BF16 = torch.bfloat16
OTHERS = [
    name
    for name in FAMILIES
    if name not in {row.model_type for row in [row for row in FAMILIES.values() if isinstance(row, PackedFamily)]}
]
TILED = [Grid(1, 1, 1), Grid(3, 1, 2), Grid(2, 1, 1), Grid(2, 1, 2), Grid(1, 1, 1)]
LOSS = 1.1


def grids_of(rig: Rig) -> list[Grid]:
    geometry = rig.tower.geometry
    if not isinstance(geometry, TileGeometry) or isinstance(geometry, MarginGeometry):
        m = geometry.merge
        return [Grid(1, h * m, w * m) for h, w in ((2, 3), (5, 4), (1, 7), (6, 6))]
    return [grid for grid in TILED if not list(geometry.wrong(grid, rig.modality(grid)))]


@pytest.mark.parametrize("model_type", OTHERS)
def test_row(
    model_type: str,
    captured: Callable[[str], Rig],
    device: torch.device,
    yardsticks: Callable[[str, torch.dtype], Yardstick],
) -> None:
    rig = captured(model_type)
    yardstick, grids = yardsticks(model_type, BF16), grids_of(rig)
    usual = max(yardstick.lost(rig, grids))
    items = rig.items(grids)
    eager = rows_of(rig.engine.launch(items, None).collect())
    assert max(yardstick.errors(rig, eager, grids)) <= LOSS * usual
    for number, item in enumerate(items):
        rig.poison()
        replayed = rows_of(rig.engine.launch([item], rig.holding([item])).collect())
        assert yardstick.errors(rig, replayed, grids[number : number + 1], seed=number)[0] <= LOSS * usual
    if device.type == "cuda":
        item = items[0]
        torch.cuda.set_sync_debug_mode("error")
        try:
            running = rig.engine.launch([item], rig.holding([item]))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert yardstick.errors(rig, rows_of(running.collect()), grids[:1])[0] <= LOSS * usual
