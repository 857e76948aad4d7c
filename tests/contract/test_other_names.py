"""Checkpoints under other names than those of the demo models, which are the ones that transformers writes."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from broken import load
from checkpoints import Checkpoints

Weights = dict[str, Tensor]


def _halves(name: str, rows: Tensor, heads: int = 4) -> Tensor:
    """Rows of rotary projections as transformers holds them: of each head, the even ones first."""
    if not name.endswith(("attention.q_proj.weight", "attention.k_proj.weight")):
        return rows
    return torch.cat([part for head in rows.chunk(heads) for part in (head[::2], head[1::2])])


@dataclass(frozen=True)
class Layout:
    """Names of a checkpoint."""

    names: dict[str, str]
    """Regular expressions for the demo model's names, and what they become, one after the other."""
    stored: Callable[[str, Tensor], Tensor] = lambda _, tensor: tensor
    """From a name of this layout and the demo model's weight to the one that is stored."""


LAYOUTS = {
    "cosmos3_omni": Layout({r"^(blocks|merger|patch_embed|pos_embed|deepstack_merger_list)\.": r"model.visual.\1."}),
    "cosmos3_edge": Layout(
        {
            r"^model\.visual\.(.*)\.mlp\.up_proj\.": r"model.visual.\1.mlp.fc1.",
            r"^model\.visual\.(.*)\.mlp\.down_proj\.": r"model.visual.\1.mlp.fc2.",
            r"^model\.visual\.(.*)\.to_([qkv])\.": r"model.visual.\1.\2_proj.",
        }
    ),
    "shieldgemma2": Layout(
        {r"^model\.model\.vision_tower\.": "model.vision_tower.vision_model.", r"^model\.model\.": "model."}
    ),
    "altclip": Layout({r"\.encoder\.layer\.": ".encoder.layers."}),
    "hyperclovax_vision_v2": Layout({r"^model\.vision_projector\.": "model.projector."}),
    "mistral3": Layout(
        {r"^vision_tower\.": "model.vision_encoder.", r"^multi_modal_projector\.": "model.vision_projection."}
    ),
    "mistral_large4": Layout(
        {
            r"^vision_encoder\.": "model.vision_tower.",
            r"^pre_mm_projector_norm\.": "model.multi_modal_projector.norm.",
            r"^patch_merger\.": "model.multi_modal_projector.patch_merger.",
            r"^vision_language_adapter\.w_in\.": "model.multi_modal_projector.linear_1.",
            r"^vision_language_adapter\.w_out\.": "model.multi_modal_projector.linear_2.",
            r"\.attention\.w([qkvo])\.": r".attention.\1_proj.",
            r"\.feed_forward\.w1\.": ".feed_forward.gate_proj.",
            r"\.feed_forward\.w2\.": ".feed_forward.down_proj.",
            r"\.feed_forward\.w3\.": ".feed_forward.up_proj.",
        },
        _halves,
    ),
}
"""By model_type. LightOnOCR 1B is published as a Mistral 3."""


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_other_names_load(model_type: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    source, layout = checkpoints(model_type), LAYOUTS[model_type]
    weights: Weights = {}
    for shard in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            for pattern, replacement in layout.names.items():
                name = re.sub(pattern, replacement, name)  # noqa: PLW2901 - renamed step by step
            weights[name] = layout.stored(name, tensor).contiguous()
    (index,) = source.glob("*.index.json")
    assert all(
        any(re.search(name, key) for key in json.loads(index.read_text())["weight_map"]) for name in layout.names
    )
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(source / name, tmp_path)
    assert load(tmp_path).fingerprint == load(source).fingerprint
