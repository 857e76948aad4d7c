"""Pooled towers on the device: the pooler is captured with the tower, and each item keeps its own row."""

import numpy as np
import pytest
import torch

from checkpoints import Checkpoints
from plain_reference import PlainReference
from raster_reference import Siglip2
from reference import norm_error
from rigs import Rig, rows_of
from vitwire_server.core.grids import Grid
from vitwire_server.core.models import TileGeometry
from vitwire_server.core.pooling import Pooling

BF16 = torch.bfloat16
LOSS = 1.25
"""An item has one row here, of which luck decides more than of many."""
TILES = [Grid(1, 1, 1), Grid(3, 1, 1), Grid(2, 1, 1), Grid(1, 1, 1)]
PATCHES = [Grid(1, 4, 6), Grid(1, 1, 7), Grid(1, 12, 12), Grid(1, 6, 6)]


@pytest.mark.parametrize(
    ("model_type", "pooling"),
    [
        ("clip", Pooling.CLS),
        ("aimv2", Pooling.ATTENTION),
        ("dinov3_vit", Pooling.CLS),
        ("siglip", Pooling.ATTENTION),
        ("siglip2", Pooling.ATTENTION),
        ("siglip2", Pooling.MEAN),
    ],
)
def test_rows_are_those_of_transformers(
    model_type: str, pooling: Pooling, checkpoints: Checkpoints, device: torch.device
) -> None:
    folder, kind = checkpoints(model_type), Siglip2 if model_type == "siglip2" else PlainReference
    rig = Rig.of(folder, BF16, device, pooling=pooling)
    assert not rig.graphs.dropped, rig.graphs.dropped
    grids = TILES if isinstance(rig.tower.geometry, TileGeometry) else PATCHES
    exact, rounded = kind(folder), kind(folder, BF16, str(device))
    theirs = [exact.pooled(pooling, rig.pixels(grid, i).float(), grid) for i, grid in enumerate(grids)]
    lost = [norm_error(rounded.pooled(pooling, rig.pixels(grid, i), grid), theirs[i]) for i, grid in enumerate(grids)]
    items = rig.items(grids)
    eager = rows_of(rig.engine.launch(items, None).collect())
    rig.poison()
    replayed = rows_of(rig.engine.launch(items, rig.holding(items)).collect())
    alone = [rig.run([item])[0] for item in items]
    again = rows_of(rig.engine.launch(items, rig.holding(items)).collect())
    assert all(map(np.array_equal, again, replayed)), "replays return the same bits"
    for own in (eager, replayed, alone):
        assert max(norm_error(row, other) for row, other in zip(own, theirs, strict=True)) <= LOSS * max(lost)
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            running = rig.engine.launch(items, rig.holding(items))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert norm_error(rows_of(running.collect())[0], theirs[0]) <= LOSS * max(lost)
