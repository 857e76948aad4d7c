"""A whole VLM whose vision tower is the remote one generates the same tokens."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from checkpoints import Checkpoints
from reference import Reference
from servers import serving
from vitwire import Client
from vitwire.integrations.transformers import attach, detach

ATTACHED = (
    pytest.param("qwen2_vl", marks=pytest.mark.matrix),
    "qwen2_5_vl",
    "qwen3_vl",
    pytest.param("qwen3_vl_moe", marks=pytest.mark.matrix),
)
"""The model types that the integration takes."""


@pytest.fixture(scope="module", params=ATTACHED)
def pair(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Iterator[tuple[Any, Client]]:
    """A local VLM in float32, and a client of a server that holds the same checkpoint."""
    model = Reference(checkpoints(request.param)).model
    flags = ("--dtype", "float32", "--graphs", "simulated", "--max-budget-tokens", "64")
    with serving(checkpoints(request.param), *flags) as process, Client(process.target) as client:
        yield model, client


def prompt(model: Any, grids: list[tuple[int, int, int]]) -> dict[str, torch.Tensor]:
    """Token ids with a placeholder per embedding row, and random patches: images, or one clip."""
    config = model.config
    video = grids[0][0] > 1
    placeholder, kind = (config.video_token_id, 2) if video else (config.image_token_id, 1)
    ids, types = [5, 6], [0, 0]
    for t, h, w in grids:
        # Qwen3-VL has a segment of its own for each frame of a clip.
        parts = [(1, h, w)] * t if video and config.model_type.startswith("qwen3") else [(t, h, w)]
        for tokens in (a * b * c // 4 for a, b, c in parts):
            ids += [config.vision_start_token_id, *[placeholder] * tokens, config.vision_end_token_id]
            types += [0, *[kind] * tokens, 0]
    columns = 3 * 2 * config.vision_config.patch_size**2
    generator = torch.Generator().manual_seed(3)
    pixels = torch.randn(sum(int(np.prod(grid)) for grid in grids), columns, generator=generator)
    suffix, name = ("_videos", "video") if video else ("", "image")
    return {
        "input_ids": torch.tensor([[*ids, 7, 8]]),
        "mm_token_type_ids": torch.tensor([[*types, 0, 0]]),
        f"pixel_values{suffix}": pixels,
        f"{name}_grid_thw": torch.tensor(grids),
    }


@pytest.mark.parametrize("grids", [[(1, 8, 12), (1, 4, 4)], [(3, 8, 6)]], ids=["images", "clip"])
def test_the_remote_tower_generates_the_same_tokens(
    pair: tuple[Any, Client], grids: list[tuple[int, int, int]]
) -> None:
    model, client = pair
    inputs = prompt(model, grids)
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    local = model.generate(**inputs, **settings)
    blind = model.generate(**{k: torch.zeros_like(v) if "pixel" in k else v for k, v in inputs.items()}, **settings)
    assert not torch.equal(local, blind), "the tokens depend on the pixels"
    tower = attach(model, client)
    try:
        assert not list(tower.parameters()), "the remote tower has no weights here"
        remote = model.generate(**inputs, **settings)
    finally:
        detach(model)
    assert torch.equal(local, remote)
    assert torch.equal(local, model.generate(**inputs, **settings)), "detach restores the local tower"
