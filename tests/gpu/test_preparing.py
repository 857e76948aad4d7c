"""A server that prepares pictures on its device."""

import numpy as np
import torch
from PIL import Image

from checkpoints import Checkpoints
from clear_files import faded
from encoded_files import clip, frames_of, moving, saved
from prepared import of_clips, of_images
from servers import serving
from vitwire import Client, Item
from vitwire_server.preparing import pillow
from vitwire_server.preparing.rules.sampling import sampled

SIZES = [(300, 400), (57, 55), (90, 301)]


def drawn(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)


def test_a_server_prepares_on_the_device(checkpoints: Checkpoints, device: torch.device) -> None:
    folder, pictures = checkpoints("qwen3_vl"), [drawn(*size) for size in SIZES]
    with (
        serving(folder, "--device", str(device), "--prepare", "device") as server,
        Client(server.target) as client,
    ):
        own = [client.encode_images([each])[0] for each in pictures]  # alone, as rows depend on the budget
        assert server.metric("vitwire_prepared_total", where="device", reason="") == len(pictures)
        assert server.metric("vitwire_prepare_seconds_count", where="device", stage="batch") == len(pictures)
        spent = server.metric("vitwire_prepare_seconds_sum", stage="batch")
        assert 0 < spent < server.metric("vitwire_stage_seconds_sum", stage="execute")
        made = [pillow.prepared(each, of_images(folder)) for each in pictures]
        expected = [client.encode([Item(each.pixels, each.grid)])[0] for each in made]
    for mine, theirs in zip(own, expected, strict=True):
        assert mine.grid == theirs.grid
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())


def test_files_are_prepared_as_they_are_shown(checkpoints: Checkpoints, device: torch.device) -> None:
    """A transparent image and a clip of a phone, against plain pixels."""
    clear = faded()
    white = Image.new("RGB", clear.size, "white")
    white.paste(clear, mask=clear)
    film = clip(moving(30), 10.0, matrix=(0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30))
    folder = checkpoints("qwen3_vl")
    recipe = of_clips(folder)
    assert recipe.settings.sampling
    frames = frames_of(film, sampled(30, 10.0, recipe.settings.sampling, recipe.temporal))
    with (
        serving(folder, "--device", str(device), "--prepare", "device") as server,
        Client(server.target) as client,
    ):
        own = client.encode([Item(encoded=saved(clear, "PNG"))]) + client.encode([Item.from_file(film)])
        expected = client.encode_images([np.asarray(white)])
        expected += client.encode_clips([np.stack([np.rot90(each, -1) for each in frames])])
        assert server.metric("vitwire_prepared_total", where="device", reason="") == 4
    for mine, theirs in zip(own, expected, strict=True):
        assert mine.grid == theirs.grid
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())
