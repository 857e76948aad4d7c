"""Pictures prepared on the device equal those that Pillow prepares, by every rule and over the wire."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from prepared import MODELS, of_images
from servers import serving
from vitwire import Client, Item
from vitwire_server.core.items import Modality
from vitwire_server.preparing import pillow
from vitwire_server.runtime.preparing import fault_of, prepared, resize

SIZES = [(300, 400), (57, 55), (90, 301)]


def drawn(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.parametrize("name", MODELS)
def test_every_rule(name: str, device: torch.device) -> None:
    assert fault_of(MODELS[name], device) == ""
    own = MODELS[name][Modality.IMAGE]
    for size in SIZES:
        expected = pillow.prepared(drawn(*size), own)
        pixels, crops = prepared(torch.from_numpy(drawn(*size)).to(device), own)
        np.testing.assert_array_equal(pixels.cpu().numpy(), expected.pixels)
        if expected.crops is not None:
            assert crops is not None
            np.testing.assert_array_equal(crops.cpu().numpy(), expected.crops)


@pytest.mark.parametrize(("source", "target"), [((1080, 1920), (768, 1344)), ((3024, 4032), (864, 1184))])
def test_photographs(source: tuple[int, int], target: tuple[int, int], device: torch.device) -> None:
    picture = drawn(*source)
    expected = np.asarray(Image.fromarray(picture).resize((target[1], target[0]), Image.Resampling.BICUBIC))
    got = resize(torch.from_numpy(picture).to(device), target, Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(got.cpu().numpy(), expected)


def test_a_server_prepares_on_the_device(checkpoints: Callable[[str], Path], device: torch.device) -> None:
    folder, pictures = checkpoints("qwen3_vl"), [drawn(*size) for size in SIZES]
    with (
        serving(folder, "--device", str(device), "--prepare", "device") as server,
        Client(server.target) as client,
    ):
        own = [client.encode_images([each])[0] for each in pictures]  # alone, as rows depend on the budget
        assert server.metric("vitwire_prepared_total", where="device", reason="") == len(pictures)
        made = [pillow.prepared(each, of_images(folder)) for each in pictures]
        expected = [client.encode([Item(each.pixels, each.grid)])[0] for each in made]
    for mine, theirs in zip(own, expected, strict=True):
        assert mine.grid == theirs.grid
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())
