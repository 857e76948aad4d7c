"""Checkpoints whose vision tower is stored in float8, in the layout that ModelOpt's `fp8_vision` recipes export.

Linear layers of the tower but for the patch embedding: `weight` in float8_e4m3fn, `weight_scale` and `input_scale` as
float32 numbers; `hf_quant_config.json`, and the same in `config.json`. With `per_channel`, a scale for each output
channel and no `input_scale`, as its FP8_PER_CHANNEL_PER_TOKEN.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
LARGEST = 448


def write_float8(source: Path, folder: Path, *, per_channel: bool = False) -> dict[str, Tensor]:
    """Write the checkpoint to `folder`; returns the float32 weights that its float8 ones stand for, by name."""
    shutil.copytree(source, folder)
    index = json.loads((folder / INDEX).read_text())
    exact: dict[str, Tensor] = {}
    for shard in sorted(set(index["weight_map"].values())):
        found: dict[str, Tensor] = {}
        for name, tensor in load_file(folder / shard).items():
            if not is_quantised(name, tensor):
                found[name] = tensor
                continue
            weight, stem = tensor.float(), name.removesuffix("weight")
            largest = weight.abs().amax(1) if per_channel else weight.abs().max()
            scale = largest / LARGEST
            column = scale[:, None] if per_channel else scale
            found[name] = (weight / column).to(torch.float8_e4m3fn)
            found[f"{stem}weight_scale"] = scale
            if not per_channel:
                found[f"{stem}input_scale"] = torch.tensor(0.02)
            exact[name] = found[name].float() * column
        save_file(found, folder / shard, {"format": "pt"})
        index["weight_map"] |= dict.fromkeys(found, shard)
    (folder / INDEX).write_text(json.dumps(index))
    algorithm = "FP8_PER_CHANNEL_PER_TOKEN" if per_channel else "FP8"
    excluded = ["lm_head", "model.language_model*", "model.visual.patch_embed*"]
    producer = {"name": "modelopt", "version": "0.45.0"}
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": excluded}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": producer, "quantization": quantization}))
    config = json.loads((folder / "config.json").read_text())
    numbers = {"dynamic": False, "num_bits": 8, "type": "float"}
    groups = {"group_0": {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}}
    config["quantization_config"] = {
        "config_groups": groups,
        "ignore": excluded,
        "quant_algo": algorithm,
        "producer": producer,
        "quant_method": "modelopt",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return exact


def is_quantised(name: str, tensor: Tensor) -> bool:
    """True for weights of the tower's linear layers."""
    return "visual." in name and name.endswith(".weight") and tensor.ndim == 2 and "pos_embed" not in name


def write_dequantised(source: Path, folder: Path, exact: dict[str, Tensor]) -> None:
    """Write the same checkpoint with `exact` weights in float32, for plain transformers."""
    shutil.copytree(source, folder)
    index = json.loads((folder / INDEX).read_text())
    for shard in sorted(set(index["weight_map"].values())):
        found = {name: exact.get(name, tensor) for name, tensor in load_file(folder / shard).items()}
        save_file(found, folder / shard, {"format": "pt"})
