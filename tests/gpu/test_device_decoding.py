"""JPEG files decoded by the hardware engines of a GPU: within 1 of Pillow's pixels."""

from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("nvidia.nvimgcodec")

from vitwire_server.preparing.device.hardware import Hardware, fault_of
from vitwire_server.preparing.files.images import is_plain

OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"subsampling": "4:2:2"}, {"subsampling": "4:4:4"}, {"quality": 100}, {"quality": 20},
    {"restart_marker_blocks": 5}, {"optimize": True},
)  # fmt: skip
SIZES = ((16, 16), (17, 300), (333, 517), (1081, 1921))


@pytest.fixture(scope="module")
def decoder(device: torch.device) -> Hardware:
    return Hardware(str(device))


def smooth(height: int, width: int) -> Image.Image:
    coarse = np.random.default_rng(width).integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def assert_within_1(decoder: Hardware, image: Image.Image, **options: Any) -> None:
    file = BytesIO()
    image.save(file, "JPEG", **{"quality": 90} | options)
    data = file.getvalue()
    assert is_plain(data)
    own = decoder.decoded(data, 1).cpu().numpy().astype(np.int16)
    expected = np.asarray(Image.open(file).convert("RGB"))
    assert np.abs(own - expected).max() <= 1, (image.size, options)
    assert not decoder._pixels().any(), "nothing is left for the next file"


def test_drawn_pictures_pass(decoder: Hardware) -> None:
    assert fault_of(decoder) == ""


def test_files(decoder: Hardware) -> None:
    for size in SIZES:
        for options in OPTIONS:
            assert_within_1(decoder, smooth(*size), **options)
        assert_within_1(decoder, smooth(*size).convert("L"))
