"""InternViT-300M-448 at its published size, with random weights, served on the CPU within memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import save_torch_state_dict
from transformers import CONFIG_MAPPING, AutoModel
from transformers.models.internvl.modeling_internvl import InternVLMultiModalProjector

from reference import norm_error
from servers import serving
from vitwire import Client, Item
from vitwire_server.demo.saving import write_json
from vitwire_server.demo.shrinking import IMAGENET, STEPS

_GIB = 1 << 30
_OVERHEAD = 2 * _GIB
"""torch, transformers, the server, and what a forward of three tiles needs."""
_LLM = 896
"""Columns of the language model of InternVL3-1B."""


def write(out: Path) -> tuple[Any, Any, int]:
    """A checkpoint of tower and projector alone, in bfloat16, in shards; returns both, and their bytes."""
    config: Any = CONFIG_MAPPING["internvl"](text_config={"model_type": "qwen2", "hidden_size": _LLM}, dtype="bfloat16")
    torch.manual_seed(0)
    tower: Any = AutoModel.from_config(config.vision_config, dtype=torch.bfloat16).eval()
    projector = InternVLMultiModalProjector(config).to(torch.bfloat16).eval()
    weights = {f"vision_tower.{name}": tensor for name, tensor in tower.state_dict().items()}
    weights |= {f"multi_modal_projector.{name}": tensor for name, tensor in projector.state_dict().items()}
    save_torch_state_dict(weights, out, max_shard_size="200MB")
    config.save_pretrained(out)
    write_json(out / "preprocessor_config.json", {**STEPS, **IMAGENET, "size": {"height": 448, "width": 448}})
    return tower, projector, sum(tensor.nbytes for tensor in weights.values())


def test_it_is_served_within_memory(tmp_path: Path) -> None:
    tower, projector, nbytes = write(tmp_path)
    assert nbytes == pytest.approx(2 * 308e6, rel=0.03)
    tiles = np.random.default_rng(0).standard_normal((3, 3, 448, 448), dtype=np.float32)
    with serving(tmp_path, "--dtype", "bfloat16") as process:
        with Client(process.target, timeout=600) as client:
            model = client.model()
            (embedding,) = client.encode([Item(tiles, (3, 1, 2))])
        status = Path(f"/proc/{process.process.pid}/status").read_text()
    assert (model.embedding_width, embedding.report.tokens) == (_LLM, 3 * 256)
    peak = 1024 * int(status.partition("VmHWM:")[2].split()[0])
    assert peak < 2 * nbytes + _OVERHEAD, f"{peak / _GIB:.2f} GiB for weights of {nbytes / _GIB:.2f}"
    with torch.inference_mode():
        patches = tower(pixel_values=torch.from_numpy(tiles).bfloat16()).last_hidden_state[:, 1:]
        columns = patches.view(3, 32, 16, 2048).permute(0, 2, 1, 3).reshape(3, 16, 16, 4096).permute(0, 2, 1, 3)
        rows = projector(columns.reshape(3, 256, 4096)).flatten(0, 1)
    assert norm_error(embedding.numpy(), rows.float().numpy()) < 0.02
