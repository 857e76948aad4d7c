"""What the client takes from a device, and gives to one. Needs CUDA and grpcio."""

import pickle

import numpy as np
import pytest
import torch

pytest.importorskip("grpc")

from vitwire import Embedding, Report
from vitwire._arguments import batch_items

GRIDS = [(1, 4, 2), (1, 2, 2), (2, 2, 4)]
CUTS = [(0, 8), (8, 12), (12, 28)]


@pytest.fixture(autouse=True)
def needs_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs CUDA")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("listed", [False, True], ids=["whole", "listed"])
def test_a_batch_comes_to_the_host_in_one_transfer(device: torch.device, dtype: torch.dtype, listed: bool) -> None:
    rows = (torch.rand(28, 6, device=device) * 200).to(dtype)
    given = [rows[start:end] for start, end in CUTS] if listed else rows
    with torch.profiler.profile() as profile:
        items = batch_items(given, torch.tensor(GRIDS, device=device))
    copies = [event for event in profile.events() if "Memcpy DtoH" in event.name]
    assert len(copies) <= 2, "of the pixels and of the grids"
    kept = torch.float32 if dtype == torch.float64 else dtype
    for item, (start, end) in zip(items, CUTS, strict=True):
        pixels = item.pixels
        assert isinstance(pixels, torch.Tensor)
        assert (pixels.device.type, pixels.dtype) == ("cpu", kept)
        assert pixels.equal(rows[start:end].to(kept).cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_go_to_a_device_and_come_from_one(device: torch.device, dtype: torch.dtype) -> None:
    rows = torch.randn(5, 12).to(dtype)
    name = str(dtype).removeprefix("torch.")
    held = (rows.view(torch.uint16) if dtype == torch.bfloat16 else rows).numpy()
    copied = Embedding(held, name, 1, Report()).torch(device)
    assert (copied.device, copied.dtype) == (device, dtype)
    assert copied.cpu().equal(rows)
    there = Embedding(copied, name, 1, Report())
    assert there.torch(device).data_ptr() == there.torch().data_ptr() == copied.data_ptr()
    assert there.torch("cpu").equal(rows)
    np.testing.assert_array_equal(np.asarray(there), rows.float().numpy())
    np.testing.assert_array_equal(there.deepstack[0], rows[:, 6:].float().numpy())
    assert pickle.loads(pickle.dumps(there)).torch().equal(copied)
