"""`--precision fp8`: a real server on a CPU against plain transformers in float32, and what it reports and refuses."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from checkpoints import Checkpoints
from reference import Array, Reference
from servers import ServerProcess, serving
from vitwire import Client, Embedding, InvalidItem, Item
from vitwire_server.runtime.precision.similarity import least_cosines

PHOTOGRAPH = Path(mpl.get_data_path()) / "sample_data" / "grace_hopper.jpg"
FLOOR = 0.99
FP8 = ("--precision", "fp8", "--graphs", "simulated", "--max-budget-tokens", "512")


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints) -> Iterator[ServerProcess]:
    with serving(checkpoints("qwen3_vl"), *FP8, "--precision-floor", str(FLOOR)) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.target) as one:
        yield one


def similarity(rows: Array, expected: Array, levels: int) -> float:
    """Of the least similar row or level."""
    return float(least_cosines(torch.as_tensor(rows), torch.as_tensor(expected), 1 + levels).min())


def test_rows_are_those_of_transformers_in_float32(
    client: Client, checkpoints: Checkpoints, references: Callable[..., Reference]
) -> None:
    reference, levels = references("qwen3_vl", torch.float32), client.model().deepstack_levels
    with Image.open(PHOTOGRAPH) as opened:
        image = opened.convert("RGB")
    inputs = Qwen2VLImageProcessorPil.from_pretrained(checkpoints("qwen3_vl"))(image, return_tensors="pt")
    photograph = (np.asarray(inputs["pixel_values"]), tuple(inputs["image_grid_thw"][0].tolist()))
    rng = np.random.default_rng(0)
    noise = [
        (rng.standard_normal((t * h * w, photograph[0].shape[1]), dtype=np.float32), (t, h, w))
        for t, h, w in ((1, 2, 2), (1, 8, 12), (2, 6, 4))
    ]
    cases = [photograph, *noise]
    items = [Item(pixels, grid, modality="image" if grid[0] == 1 else "video") for pixels, grid in cases]
    for (pixels, grid), embedding in zip(cases, client.encode(items), strict=True):
        expected = reference.encode(pixels, [grid])[0]
        assert similarity(embedding.numpy(), expected, levels) >= FLOOR
        assert similarity(embedding.numpy(), expected, levels) < 1 - 1e-5, "it is in float8"


def test_nan_in_one_item_does_not_reach_another(client: Client) -> None:
    model, rng = client.model(), np.random.default_rng(1)
    width = model.channels * model.temporal_patch_size * model.patch_size**2
    grid, patches = (1, 6, 8), 48
    good = [Item(rng.standard_normal((patches, width), dtype=np.float32), grid) for _ in range(2)]
    lost = Item(np.full((patches, width), np.nan, np.float32), grid)
    alone = [client.encode([item])[0].numpy() for item in good]
    results = dict(client.iter_encode([good[0], lost, good[1]], return_exceptions=True))
    assert isinstance(results[1], InvalidItem)
    for position, expected in zip((0, 2), alone, strict=True):
        embedding = results[position]
        assert isinstance(embedding, Embedding)
        assert similarity(embedding.numpy(), expected, model.deepstack_levels) > 0.9999


@pytest.mark.matrix
def test_what_was_measured_is_reported(client: Client, server: ServerProcess, checkpoints: Checkpoints) -> None:
    model = client.model()
    assert model.dtype == "bfloat16"
    assert model.precision is not None
    assert (model.precision.type, model.precision.layers) == ("float8_e4m3fn", 12)
    assert FLOOR <= model.precision.similarity < model.precision.median_similarity < 1
    assert server.metric("vitwire_precision_similarity") == pytest.approx(model.precision.similarity)
    logged = re.search(r"12 linear layers in float8_e4m3fn; 768 rows .* least (0\.\d+), median", server.log())
    assert logged
    assert float(logged[1]) == pytest.approx(model.precision.similarity, abs=1e-5)
    with serving(checkpoints("qwen3_vl"), "--dtype", "bfloat16") as usual, Client(usual.target) as other:
        assert other.model().precision is None
        assert other.model().weights_fingerprint != model.weights_fingerprint, "caches must not mix their rows"
        assert usual.metric("vitwire_precision_similarity") == 1


def test_a_floor_that_is_not_reached_is_an_error(checkpoints: Checkpoints) -> None:
    with serving(checkpoints("qwen3_vl"), *FP8, "--precision-floor", "0.99999", wait=False) as server:
        assert server.process.wait(60) == 2
        assert re.search(
            r"--precision-floor 0\.99999: with --precision fp8, the lowest cosine similarity to bfloat16 is "
            r"0\.99\d+ .*lower the floor",
            server.log(),
        )
