"""Towers in float8: every kind of them against plain transformers, with and without company."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from checkpoints import MODEL_TYPES, Checkpoints
from reference import Reference
from rigs import Rig, draw_grids
from vitwire_server.runtime.float8 import reduce
from vitwire_server.runtime.similarity import Comparison, least_cosines

References = Callable[..., Reference]
CPU = torch.device("cpu")
EVERYDAY = ("qwen2_5_vl", "internvl", "gemma4")
FLOOR, MEDIAN = 0.9, 0.99
"""Rows of random weights and few columns; wrong ones are below 0.5."""


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.matrix) for name in MODEL_TYPES]
)
def test_rows_of_a_tower_in_float8(model_type: str, checkpoints: Checkpoints, references: References) -> None:
    reference = references(model_type, torch.float32)
    rig = Rig.of(checkpoints(model_type), torch.bfloat16, CPU, sizes=())
    comparison = Comparison(rig.tower, rig.engine)
    assert float(comparison.similarities().min()) == pytest.approx(1)
    assert sum(reduce(block) for block in rig.tower.blocks) >= 2 * len(rig.tower.blocks)
    assert rig.tower.dtype is torch.bfloat16
    similarities = comparison.similarities()
    assert close(similarities)
    assert float(similarities.min()) < 1 - 1e-5, "it is in float8"

    grids = draw_grids(rig, 1, 4)
    items = rig.items(grids)
    alone, together = [rig.run([item])[0] for item in items], rig.run(items)
    parts = 1 + rig.tower.geometry.levels
    for i, (grid, own, packed) in enumerate(zip(grids, alone, together, strict=True)):
        exact = torch.as_tensor(reference.item(grid, rig.pixels(grid, i), rig.crops(grid, i)))
        for rows in (own, packed):
            assert close(least_cosines(exact, torch.as_tensor(rows), parts))


def close(similarities: Tensor) -> bool:
    return bool(similarities.min() > FLOOR and similarities.median() > MEDIAN)
