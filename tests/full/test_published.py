"""Towers at their published size, with random weights, served on the CPU within memory. Minutes and gigabytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import save_torch_state_dict
from transformers import CONFIG_MAPPING

from reference import norm_error
from servers import serving
from vitwire import Client, Item
from vitwire_server.towers.families import FAMILIES
from vitwire_server.towers.tiny import CLIP, STEPS, write_json

_GIB = 1 << 30
_OVERHEAD = 3 * _GIB // 2
"""torch, transformers, the server, and a forward of a few hundred patches; a second copy of the weights has no room."""


@dataclass(frozen=True)
class Published:
    """A tower at its published size."""

    model_type: str
    fields: Mapping[str, Any]
    """Of the vision configuration."""
    prefix: str
    parameters: int
    """About as many, in millions."""


QWEN2_5_VL = Published(
    "qwen2_5_vl",
    {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "visual.",
    676,
)


def write(published: Published, out: Path) -> tuple[Any, int]:
    """A checkpoint of the vision tower alone, in bfloat16, in shards; returns the tower, and its bytes."""
    family = FAMILIES[published.model_type]
    config_class: Any = CONFIG_MAPPING[published.model_type]
    config = config_class(vision_config=dict(published.fields), dtype="bfloat16")
    torch.manual_seed(0)
    source: Any = family.tower.resolve()
    tower = source._from_config(family.tower.configuration(config), dtype=torch.bfloat16).eval()
    weights = {published.prefix + name: tensor for name, tensor in tower.state_dict().items()}
    save_torch_state_dict(weights, out, max_shard_size="500MB")
    config.save_pretrained(out)
    write_json(
        out / "preprocessor_config.json",
        {**STEPS, **CLIP, "size": {"shortest_edge": 3136, "longest_edge": 12845056}},
    )
    return tower, sum(tensor.nbytes for tensor in weights.values())


@pytest.mark.parametrize("published", [QWEN2_5_VL], ids=lambda published: published.model_type)
def test_a_published_tower_is_served_within_memory(published: Published, tmp_path: Path) -> None:
    tower, nbytes = write(published, tmp_path)
    assert nbytes == pytest.approx(2e6 * published.parameters, rel=0.03)
    grid = (1, 16, 24)
    pixels = np.random.default_rng(0).standard_normal((grid[1] * grid[2], 3 * 2 * 14 * 14), dtype=np.float32)
    with serving(tmp_path, "--dtype", "bfloat16", "--compile", "off") as process:
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
