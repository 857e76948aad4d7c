"""Every packed row of the table on the device: graphs captured, images and clips together and alone."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from reference import Array, norm_error
from references import reference_of
from rigs import RIGHT, Rig, draw_grids
from vitwire_server.core.grids import Grid
from vitwire_server.towers.layouts.packed import PackedFamily
from vitwire_server.towers.registry import FAMILIES

BF16 = torch.bfloat16
LOSS = 1.1
"""Our bfloat16 may lose so many times what transformers' own bfloat16 loses on the same device."""


@pytest.mark.parametrize("model_type", [name for name, row in FAMILIES.items() if isinstance(row, PackedFamily)])
def test_bfloat16_loses_no_more_than_transformers(
    model_type: str, captured: Callable[[str], Rig], checkpoints: Callable[[str], Path], device: torch.device
) -> None:
    rig, folder = captured(model_type), checkpoints(model_type)
    grids = draw_grids(rig, 2, 12)
    lost = [losses(rig, folder, model_type, grids, seed, str(device)) for seed in (0, 100, 200)]
    items = rig.items(grids)
    exact = [reference_rows(rig, folder, model_type, torch.float32, "cpu", grid, i) for i, grid in enumerate(grids)]
    for encoded in (rig.run(items), [rig.run([item])[0] for item in items]):
        ours = [norm_error(own, other) for own, other in zip(encoded, exact, strict=True)]
        assert np.mean(ours) <= LOSS * np.mean(lost)
        assert max(ours) <= RIGHT, "an item of one row may lose a quarter more than others do, by chance"


def losses(rig: Rig, folder: Path, model_type: str, grids: Sequence[Grid], seed: int, device: str) -> list[float]:
    """What transformers' own bfloat16 loses on the device."""

    def rows(dtype: torch.dtype, where: str) -> list[Array]:
        return [reference_rows(rig, folder, model_type, dtype, where, grid, seed + i) for i, grid in enumerate(grids)]

    return [norm_error(*pair) for pair in zip(rows(BF16, device), rows(torch.float32, "cpu"), strict=True)]


_REFERENCES: dict[tuple[str, torch.dtype], object] = {}


def reference_rows(
    rig: Rig, folder: Path, model_type: str, dtype: torch.dtype, device: str, grid: Grid, seed: int
) -> Array:
    key = (model_type, dtype)
    if key not in _REFERENCES:
        _REFERENCES[key] = reference_of(model_type, folder, dtype, device)
    reference = _REFERENCES[key]
    return reference.item(grid, rig.pixels(grid, seed), rig.crops(grid, seed))
