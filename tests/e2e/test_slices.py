"""Slices of any size over the wire, as MiniCPM-V's processor emits them, against its authors' formula."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from PIL import Image

from checkpoints import Checkpoints
from entered import entered
from published_processors import minicpm_slices
from published_reference import MiniCPMV
from reference import TOLERANCE, error
from servers import ServerProcess, serving
from vitwire import Client, EncodeFailed, InvalidItem, Item

pytestmark = pytest.mark.matrix
PHOTOGRAPH = Path(mpl.get_data_path()) / "sample_data" / "grace_hopper.jpg"
SIDE = 14
FLAGS = ("--dtype", "float32", "--graphs", "simulated", "--max-budget-tokens", "256")

server = entered(lambda checkpoints: serving(checkpoints("minicpmv"), *FLAGS))


def processed(image: Image.Image) -> dict[str, Any]:
    """The processor's outputs for a prompt of one image, with slices of about 112 x 112 pixels."""
    slices = [np.asarray(each, np.float32) / 255 for each in minicpm_slices(image, scale=112)]
    pixels = [torch.from_numpy((each - 0.5) / 0.5).permute(2, 0, 1) for each in slices]
    columns = [torch.nn.functional.unfold(each[None], SIDE, stride=SIDE)[0] for each in pixels]
    rows = [each.view(3, SIDE, SIDE, -1).permute(0, 1, 3, 2).reshape(3, SIDE, -1) for each in columns]
    sizes = torch.tensor([[each.shape[1] // SIDE, each.shape[2] // SIDE] for each in pixels])
    return {"pixel_values": [rows], "tgt_sizes": [sizes]}


def test_slices_of_a_photograph_equal_the_published_formula(server: ServerProcess, checkpoints: Checkpoints) -> None:
    wide = Image.open(PHOTOGRAPH).convert("RGB").crop((0, 100, 512, 220))
    items = Item.from_processor(processed(wide))
    assert len({item.grid for item in items}) == 2, "the whole image has another shape than its slices"
    reference = MiniCPMV(checkpoints("minicpmv"))
    with Client(server.target) as client:
        embeddings = client.encode(items)
    for item, embedding in zip(items, embeddings, strict=True):
        assert isinstance(item.pixels, torch.Tensor)
        assert error(embedding.numpy(), reference.item(item.grid, item.pixels)) <= TOLERANCE
    assert "graph" in {embedding.report.path for embedding in embeddings}


def test_images_of_fewer_patches_than_queries_are_encoded(server: ServerProcess, checkpoints: Checkpoints) -> None:
    """Also in a batch, which has more rows then than patches."""
    reference = MiniCPMV(checkpoints("minicpmv"))
    rng = np.random.default_rng(0)
    grids = [(1, 3, 5), (1, 1, 1), (1, 2, 3)]
    items = [Item(rng.random((h * w, 3 * SIDE**2), np.float32), (t, h, w)) for t, h, w in grids]
    with Client(server.target) as client:
        embeddings = client.encode(items * 3)
    for item, embedding in zip(items * 3, embeddings, strict=True):
        assert error(embedding.numpy(), reference.item(item.grid, torch.from_numpy(item.pixels))) <= TOLERANCE


def test_what_is_not_a_slice_is_refused(server: ServerProcess) -> None:
    with Client(server.target) as client:
        with pytest.raises(InvalidItem, match="must be at most 1024 for this model, got 1025"):
            client.encode([Item(np.zeros((1025, 3 * SIDE**2), np.uint8), (1, 1, 1025))])
        with pytest.raises(EncodeFailed, match=r"prepares no images for minicpmv.*encode_batch"):
            client.encode_images([np.zeros((28, 28, 3), np.uint8)])
