"""The floor of published towers, worked out by hand for an H200."""

from functools import partial

import pytest
import torch
from bench.floor import counted_flop, floor_seconds, flop
from bench.models import PUBLISHED, build, draw, plain, shrunk, square

MILLISECONDS = {
    "Qwen3-VL-8B": (0.27, 1.00, 7.34, 61.1, 0.92),
    "Qwen2.5-VL-7B": (0.42, 1.71, 9.2, 46.7, 1.69),
    "Qwen2-VL-7B": (0.43, 1.88, 14.0, 129, 1.72),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_floor(name: str) -> None:
    tower = build(*PUBLISHED[name], torch.bfloat16, torch.device("meta"))
    grids = [square(tower, side) for side in (224, 448, 1024, 2048)]
    floors = [1e3 * floor_seconds(tower, [grid]) for grid in (*grids, square(tower, 224, 8))]
    assert floors == pytest.approx(MILLISECONDS[name], rel=0.02)


@pytest.mark.parametrize("name", PUBLISHED)
def test_counted_work_is_that_of_the_formula_and_of_patch_embedding(name: str) -> None:
    model_type, fields = PUBLISHED[name]
    tower = build(model_type, shrunk(fields, 2, 128), torch.float32, torch.device("cpu"))
    grids = [square(tower, 224)]
    pixels = draw(tower, grids)
    counted = counted_flop(partial(plain, tower, pixels, grids))
    assert counted == pytest.approx(flop(tower, grids) + 2 * pixels.numel() * 128, rel=1e-3)
