"""float32 pixels are sent in the server's type, rounded as torch rounds."""

import numpy as np
import pytest
import torch

from vitwire import Item
from vitwire._transport.uploads import rounded, to_wire
from vitwire.v1 import encoder_pb2 as pb

HALVES = np.arange(1 << 16, dtype=np.uint32) << 16
"""Every upper half of a float32."""
LARGEST = {"bfloat16": 0x7F7F_8000, "float16": 0x477F_F000}
"""The least magnitude, as bits, that each type rounds to infinity."""


def floats(dtype: str) -> np.ndarray:
    """Values that stay finite: every upper half with a tie, its neighbours, none and random lower halves."""
    random = np.random.default_rng(0).integers(0, 1 << 16, (8, 1 << 16), np.uint32)
    bits = np.concatenate([*(HALVES | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)), *(HALVES | random)])
    return bits[(bits & 0x7FFF_FFFF) < LARGEST[dtype]].view(np.float32)


@pytest.mark.parametrize("dtype", LARGEST)
def test_rounding_is_that_of_torch(dtype: str) -> None:
    values = floats(dtype)
    expected = torch.from_numpy(values).to(getattr(torch, dtype)).view(torch.uint16).numpy()
    for source in (values, values.reshape(2, -1), values[::-1][::-1], torch.from_numpy(values)):
        got = rounded(source, dtype)
        assert got is not None
        bits = got.view(torch.uint16).numpy() if isinstance(got, torch.Tensor) else got.view(np.uint16)
        assert got.shape == source.shape
        np.testing.assert_array_equal(bits.reshape(-1), expected)


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("bits", [0x7F80_0000, 0xFF80_0000, 0x7F80_0001, 0x7FFF_FFFF, 0xFFC0_0000, None])
def test_what_would_not_be_finite_stays_as_it_is(dtype: str, bits: int | None) -> None:
    """The server says what is wrong with it; rounded, a value that is too large would look like infinity."""
    values = np.ones((3, 70_000), np.float32)
    values[1, 69_999] = np.array(LARGEST[dtype] if bits is None else bits, np.uint32).view(np.float32)
    assert rounded(values, dtype) is None
    assert rounded(torch.from_numpy(values), dtype) is None
    item = to_wire(Item(values, (1, 1, 3)), dtype)
    assert item.message.pixels.data_type == pb.DATA_TYPE_FLOAT32
    assert bytes(item.tensors.pixels) == values.tobytes()


@pytest.mark.parametrize(
    "values", [np.ones((4, 8), np.uint8), np.ones((4, 8), np.float16), torch.ones(4, 8).bfloat16()]
)
def test_other_types_stay_as_they_are(values: np.ndarray | torch.Tensor) -> None:
    assert rounded(values, "bfloat16") is None


def test_a_server_in_float32_gets_float32() -> None:
    for values in (np.ones((4, 8), np.float32), torch.ones(4, 8)):
        assert rounded(values, "float32") is None


def test_pixels_and_crops_take_half_the_bytes() -> None:
    pixels, crops = np.full((2, 3, 4, 4), 1.00390625, np.float32), torch.ones(1, 3, 2, 2)
    item = to_wire(Item(pixels[..., ::2], (2, 1, 1), crops=crops), "bfloat16")
    assert (item.message.pixels.data_type, item.message.crops.data_type) == (pb.DATA_TYPE_BFLOAT16,) * 2
    assert tuple(item.message.pixels.shape) == (2, 3, 4, 2)
    assert bytes(item.tensors.pixels) == np.full(48, 0x3F80, "<u2").tobytes(), "a tie goes to the even neighbour"
    assert bytes(item.tensors.crops) == np.full(12, 0x3F80, "<u2").tobytes()
