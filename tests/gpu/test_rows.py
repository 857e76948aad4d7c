"""Rows of the table whose forwards are not stock, or take tiles: captured, right, and free of waiting."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from rigs import Rig, Yardstick, rows_of
from vitwire_server.core.geometries import MarginGeometry
from vitwire_server.core.grids import Grid
from vitwire_server.core.models import TileGeometry
from vitwire_server.towers.layouts.packed import PackedFamily
from vitwire_server.towers.registry import FAMILIES

BF16 = torch.bfloat16
OTHERS = [name for name, row in FAMILIES.items() if not isinstance(row, PackedFamily)]
TILED = [Grid(1, 1, 1), Grid(3, 1, 2), Grid(2, 1, 1), Grid(2, 1, 2), Grid(1, 1, 1)]
PATCHES = [(2, 3), (5, 4), (1, 7), (6, 6), (4, 4)]
LOSS = 1.1
CHANCE = 1.25
"""One item of a few rows may lose a quarter more than the worst of transformers' does."""


def grids_of(rig: Rig) -> list[Grid]:
    geometry = rig.tower.geometry
    if not isinstance(geometry, TileGeometry) or isinstance(geometry, MarginGeometry):
        m = geometry.merge
        grids = [Grid(1, h * m, w * m) for h, w in PATCHES]
    else:
        grids = TILED
    return [grid for grid in grids if not list(geometry.wrong(grid, rig.modality(grid)))]


@pytest.mark.parametrize("model_type", OTHERS)
def test_row(
    model_type: str,
    captured: Callable[[str], Rig],
    device: torch.device,
    yardsticks: Callable[[str, torch.dtype], Yardstick],
) -> None:
    rig = captured(model_type)
    yardstick, grids = yardsticks(model_type, BF16), grids_of(rig)
    lost = yardstick.lost(rig, grids)
    most = CHANCE * max(lost)
    items = rig.items(grids)
    eager = yardstick.errors(rig, rows_of(rig.engine.launch(items, None).collect()), grids)
    assert np.mean(eager) <= LOSS * np.mean(lost)
    assert max(eager) <= most
    for number, item in enumerate(items):
        rig.poison()
        replayed = rows_of(rig.engine.launch([item], rig.holding([item])).collect())
        assert yardstick.errors(rig, replayed, grids[number : number + 1], seed=number)[0] <= most
    if device.type == "cuda":
        item = items[0]
        torch.cuda.set_sync_debug_mode("error")
        try:
            running = rig.engine.launch([item], rig.holding([item]))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert yardstick.errors(rig, rows_of(running.collect()), grids[:1])[0] <= most
