"""What is particular about loading Kimi's vision tower: the layout that its authors publish."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import CONFIG_MAPPING

from vitwire_server.towers.family import Weights
from vitwire_server.towers.packed import PackedFamily

_FUSED = ".attn.wqkv."


def unfused(weights: Weights, config: Any) -> Weights:  # noqa: ANN401 - a configuration of transformers
    """One projection each for queries, keys and values, the rotary pairs of a head first halves, then second.

    The published weights rotate neighbouring columns, transformers those half a head apart.
    """
    apart: Weights = {}
    for name, tensor in weights.items():
        if _FUSED not in name:
            apart[name] = tensor
            continue
        queries, keys, values = tensor.chunk(3)
        for kind, own in (("q", queries), ("k", keys)):
            apart[name.replace(_FUSED, f".attn.{kind}_proj.")] = _halves(own, config.num_attention_heads)
        apart[name.replace(_FUSED, ".attn.v_proj.")] = values
    return apart


def _halves(rows: Tensor, heads: int) -> Tensor:
    """Rows (of each head) 0, 2, 4, ... and then 1, 3, 5, ..."""
    halves: Tensor = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return halves


@dataclass(frozen=True, kw_only=True)
class KimiVL(PackedFamily):
    """Kimi-VL, which transformers has no classes for: its tower is that of Kimi K2.5 for single images."""

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """See Family. Raises KeyError or TypeError where config.json is not of this model."""
        del folder
        own = settings["vision_config"]
        vision = {
            "patch_size": own["patch_size"],
            "pos_emb_height": own["init_pos_emb_height"],
            "pos_emb_width": own["init_pos_emb_width"],
            "pos_emb_time": 1,
            "num_attention_heads": own["num_attention_heads"],
            "num_hidden_layers": own["num_hidden_layers"],
            "hidden_size": own["hidden_size"],
            "intermediate_size": own["intermediate_size"],
            "merge_kernel_size": own["merge_kernel_size"],
        }
        text = {"model_type": "deepseek_v3", "hidden_size": settings["text_config"]["hidden_size"]}
        config_class: Any = CONFIG_MAPPING["kimi_k25"]
        return config_class(
            vision_config=vision,
            text_config=text,
            projection_hidden_size=own["hidden_size"],
            dtype=settings.get("torch_dtype") or settings.get("dtype"),
        )
