"""Adapters of models without classes in transformers, against checkpoints that they were merged into by hand."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import Checkpoints
from reference import TOLERANCE, error
from rigs import Rig, draw_grids
from vitwire_server.towers.checkpoints.lora import Adapter

CPU, RANK, ALPHA = torch.device("cpu"), 2, 6
ADAPTED = {
    "NVLM_D": ("vision_model.encoder.layers.1.attn.qkv", "vision_model.encoder.layers.0.mlp.fc1", "mlp1.1"),
    "minicpmv": ("vpm.encoder.layers.1.self_attn.q_proj", "resampler.kv_proj", "resampler.attn.out_proj"),
    "deepseek_vl_v2": ("vision.blocks.1.attn.qkv", "vision.blocks.0.attn.proj", "projector.layers.2"),
    "eagle_2_5_vl": ("vision_model.vision_model.encoder.layers.0.mlp.fc2", "mlp1.3"),
}
"""Linear layers by their published names."""


def write_adapter(folder: Path, weights: dict[str, Tensor], names: tuple[str, ...]) -> dict[str, Tensor]:
    """An adapter as peft saves it; what it adds to each weight."""
    generator, factors, added = torch.Generator().manual_seed(0), {}, {}
    for name in names:
        rows, columns = weights[f"{name}.weight"].shape
        down, up = (torch.randn(size, generator=generator) * 0.1 for size in ((RANK, columns), (rows, RANK)))
        factors[f"base_model.model.{name}.lora_A.weight"], factors[f"base_model.model.{name}.lora_B.weight"] = down, up
        added[f"{name}.weight"] = up @ down * (ALPHA / RANK)
    folder.mkdir()
    save_file(factors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return added


@pytest.mark.matrix
@pytest.mark.parametrize("model_type", ADAPTED)
def test_an_adapter_changes_the_rows_as_merged_weights_do(
    model_type: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    folder = checkpoints(model_type)
    weights = {key: t.float() for shard in sorted(folder.glob("*.safetensors")) for key, t in load_file(shard).items()}
    added = write_adapter(tmp_path / "adapter", weights, ADAPTED[model_type])
    merged = tmp_path / "merged"
    merged.mkdir()
    for path in folder.glob("*config.json"):
        shutil.copy(path, merged)
    save_file({key: own + added.get(key, 0) for key, own in weights.items()}, merged / "model.safetensors")
    adapter = Adapter.read("tuned", tmp_path / "adapter")
    ours = Rig.of(folder, torch.float32, CPU, sizes=(), adapter=adapter)
    theirs, before = (Rig.of(each, torch.float32, CPU, sizes=()) for each in (merged, folder))
    grid = draw_grids(ours, 1, 1)[0]
    rows, expected, plain = (rig.run(rig.items([grid]))[0] for rig in (ours, theirs, before))
    assert error(rows, expected) <= TOLERANCE
    assert error(rows, plain) > 1e-2, "the adapter changes the rows"
