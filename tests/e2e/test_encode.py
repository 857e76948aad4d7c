"""Embeddings over the wire, from real server processes, against plain transformers."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from checkpoints import MODEL_TYPES, Checkpoints
from entered import entered
from reference import TOLERANCE, Array, Reference, error
from servers import ServerProcess, serving
from vitwire import AsyncClient, Client, Item
from vitwire_server.towers.family import Accepts
from vitwire_server.towers.registry import FAMILIES

References = Callable[..., Reference]
EVERYDAY = ("qwen2_5_vl", "qwen3_vl", "kimi_k25")
SERVED = [
    pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.matrix)
    for name in (
        "qwen2_5_vl",
        "qwen3_vl",
        "qwen3_omni_moe",
        "glm4v",
        "kimi_k25",
        "paddleocr_vl",
        "minimax_m3_vl",
        "ernie4_5_vl_moe",
    )
    if name in MODEL_TYPES
]
"""One of each kind of packed tower; the contract suite runs over all of them."""
PHOTOGRAPH = Path(mpl.get_data_path()) / "sample_data" / "grace_hopper.jpg"
FLAGS = ("--dtype", "float32", "--max-budget-tokens", "256", "--graphs")

server = entered(
    lambda checkpoints, request: serving(checkpoints("qwen3_vl"), *FLAGS, request.param), params=["off", "simulated"]
)
"""Without and with graphs."""


@dataclass(frozen=True, slots=True)
class Case:
    """An item and the rows that plain transformers gives for it."""

    item: Item
    expected: Array


def draw(reference: Reference, grid: tuple[int, int, int], seed: int) -> Case:
    """Random pixels of a grid, the frame axis left out of every other image."""
    config = reference.vision_config
    rng = np.random.default_rng(seed)
    area, frames = config.patch_size**2, getattr(config, "temporal_patch_size", 1)
    rows = grid[0] * grid[1] * grid[2]
    single = grid[0] == 1 and seed % 2 == 0
    pixels = rng.standard_normal((rows, 3, 1 if single else frames, area), dtype=np.float32)
    full = np.broadcast_to(pixels, (rows, 3, frames, area)).reshape(rows, -1).copy()
    modality = "image" if grid[0] == 1 else "video"
    return Case(Item(pixels.reshape(rows, -1), grid, modality=modality), reference.encode(full, [grid])[0])


@pytest.mark.parametrize("model_type", SERVED)
def test_every_kind_of_model_equals_transformers_over_the_wire(
    model_type: str, checkpoints: Checkpoints, references: References
) -> None:
    reference = references(model_type, torch.float32)
    grids = [(1, 8, 12), (2, 6, 4), (1, 2, 2), (1, 30, 34), (2, 16, 16)]
    grids = [grid for grid in grids if FAMILIES[model_type].videos is not Accepts.NOTHING or grid[0] == 1]
    cases = [draw(reference, grid, seed) for seed, grid in enumerate(grids)]
    flags = ("--dtype", "float32", "--graphs", "simulated", "--max-budget-tokens", "128")
    with serving(checkpoints(model_type), *flags) as process, Client(process.target) as client:
        model = client.model()
        assert (model.model_type, model.dtype) == (model_type, "float32")
        embeddings = client.encode([case.item for case in cases])
        for case, embedding in zip(cases, embeddings, strict=True):
            assert error(embedding.numpy(), case.expected) <= TOLERANCE
        assert {embedding.report.path for embedding in embeddings} == {"graph", "eager"}
        levels = model.deepstack_levels
        assert len(embeddings[0].deepstack) == levels
        parts = [embeddings[0].main, *embeddings[0].deepstack]
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), embeddings[0].numpy())
        hits = process.metric("vitwire_graph_hits_total")
        fallbacks = process.metric("vitwire_eager_fallbacks_total", reason="oversize")
        assert (hits, fallbacks) == (len(cases) - 1, 1)
        assert process.metric("vitwire_items_total") == hits + fallbacks


def test_a_photograph_equals_the_stock_processor_and_tower(
    server: ServerProcess, checkpoints: Checkpoints, references: References
) -> None:
    processor = Qwen2VLImageProcessorPil.from_pretrained(checkpoints("qwen3_vl"))
    reference = references("qwen3_vl", torch.float32)
    image = Image.open(PHOTOGRAPH)
    inputs = processor(image, return_tensors="pt")
    grid = tuple(inputs["image_grid_thw"][0].tolist())
    expected = reference.encode(inputs["pixel_values"], [grid])[0]
    floats = Item(inputs["pixel_values"], grid)
    with Client(server.target) as client:
        for embedding in (*client.encode_images([PHOTOGRAPH, image, np.asarray(image)]), *client.encode([floats])):
            assert error(embedding.numpy(), expected) <= TOLERANCE


def test_64_concurrent_requests_are_answered_right_and_share_batches(
    server: ServerProcess, references: References
) -> None:
    reference = references("qwen3_vl", torch.float32)
    rng = np.random.default_rng(5)
    requests: list[list[Case]] = []
    for seed in range(64):
        grids = [(int(rng.choice([1, 1, 1, 2])), *(2 * rng.integers(1, 10, 2)).tolist()) for _ in range(1 + seed % 3)]
        requests.append([draw(reference, grid, 100 * seed + i) for i, grid in enumerate(grids)])
    before = server.metric("vitwire_batch_requests_sum"), server.metric("vitwire_batch_requests_count")

    async def run() -> list[list[Array]]:
        async with AsyncClient(server.target) as client:
            answers = await asyncio.gather(*(client.encode([c.item for c in cases]) for cases in requests))
        return [[embedding.numpy() for embedding in answer] for answer in answers]

    for cases, rows in zip(requests, asyncio.run(run()), strict=True):
        for case, own in zip(cases, rows, strict=True):
            assert error(own, case.expected) <= TOLERANCE
    shares = server.metric("vitwire_batch_requests_sum") - before[0]
    batches = server.metric("vitwire_batch_requests_count") - before[1]
    assert shares > 2 * batches, "batches hold items of several requests"


def test_large_items_travel_in_chunks(server: ServerProcess, references: References) -> None:
    reference = references("qwen3_vl", torch.float32)
    cases = [draw(reference, grid, 1) for grid in ((1, 64, 64), (3, 32, 32), (1, 2, 2))]
    assert sum(case.item.pixels.nbytes for case in cases) > 40 << 20
    with Client(server.target) as client:
        for _ in range(2):
            answers = client.encode([case.item for case in cases])
            for case, answer in zip(cases, answers, strict=True):
                assert error(answer.numpy(), case.expected) <= TOLERANCE
    assert server.metric("vitwire_requests_total", method="EncodeStream", code="OK") >= 2


@pytest.mark.parametrize("output", ["float32", "float16", "bfloat16"])
def test_rows_come_in_the_type_asked_for(server: ServerProcess, references: References, output: str) -> None:
    case = draw(references("qwen3_vl", torch.float32), (1, 8, 8), 3)
    with Client(server.target) as client:
        (embedding,) = client.encode([case.item], output_type=output)
    assert embedding.dtype == output
    assert str(embedding.torch().dtype) == f"torch.{output}"
    rounding = {"float32": TOLERANCE, "float16": 2**-11, "bfloat16": 2**-8}[output]
    assert error(embedding.numpy(), case.expected) <= rounding
