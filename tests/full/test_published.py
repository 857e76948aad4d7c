"""Towers at their published size, with random weights, served on the CPU within memory. Minutes and gigabytes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from bench.models import PUBLISHED, write

from reference import norm_error
from servers import serving
from vitwire import Client, Item

_GIB = 1 << 30
_OVERHEAD = 3 * _GIB // 2
"""torch, transformers, the server, and a forward of a few hundred patches; a second copy of the weights has no room."""


@pytest.mark.parametrize(("name", "parameters"), [("Qwen2.5-VL-7B", 676e6)])
def test_a_published_tower_is_served_within_memory(name: str, parameters: float, tmp_path: Path) -> None:
    tower = write(*PUBLISHED[name], tmp_path)
    nbytes = sum(tensor.nbytes for tensor in tower.state_dict().values())
    assert nbytes == pytest.approx(2 * parameters, rel=0.03)
    grid = (1, 16, 24)
    pixels = np.random.default_rng(0).standard_normal((grid[1] * grid[2], 3 * 2 * 14 * 14), dtype=np.float32)
    with serving(tmp_path, "--dtype", "bfloat16") as process:
        with Client(process.target, timeout=600) as client:
            (embedding,) = client.encode([Item(pixels, grid)])
        status = Path(f"/proc/{process.process.pid}/status").read_text()
    peak = 1024 * int(status.partition("VmHWM:")[2].split()[0])
    print(f"peak {peak / _GIB:.2f} GiB for weights of {nbytes / _GIB:.2f} GiB")
    assert peak < nbytes + _OVERHEAD, f"{peak / _GIB:.2f} GiB for weights of {nbytes / _GIB:.2f}"
    with torch.inference_mode():
        inputs, grids = torch.from_numpy(pixels).bfloat16(), torch.tensor([grid])
        rounded = tower(inputs, grid_thw=grids).pooler_output.float().numpy()
        # Built in bfloat16, its rotary frequencies are float32 already; the weights grow without loss.
        exact = tower.float()(inputs.float(), grid_thw=grids).pooler_output.numpy()
    ours, theirs = norm_error(embedding.numpy(), exact), norm_error(rounded, exact)
    print(f"norm error {ours:.5f}, transformers' own bfloat16 {theirs:.5f}")
    assert ours <= 1.1 * theirs, f"{ours:.4f} is lost, transformers loses {theirs:.4f}"
