"""SigLIP's towers: the module and its configuration, the layers of packed patches, and those with a mask."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vitwire_server.towers.configs import Config, new_config
from vitwire_server.towers.family import Module, in_model


def siglip(name: str) -> Module:
    """SigLIP's tower by this name, its weights within `vision_model.` or not; its pooling head is left out."""
    prefixes = in_model(f"{name}vision_model.", name)
    return Module(source="siglip.modeling_siglip:SiglipVisionModel", prefixes=prefixes, ignored=("head.",))


def siglip_config(vision: Mapping[str, object], *, width: int, dtype: str | None) -> Config:
    """A configuration that transformers has no class for: SigLIP's tower with these fields, and rows of this width."""
    return new_config(
        "deepseek_vl",
        vision_config={**vision, "vision_use_head": False},
        text_config={"model_type": "llama", "hidden_size": width},
        dtype=dtype,
    )


class SiglipAttention(Protocol):
    """A stock attention of SigLIP 1 or 2, as far as it is called here."""

    num_heads: int
    scale: float
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Linear


class SiglipLayer(Protocol):
    """A stock layer of SigLIP 1 or 2."""

    layer_norm1: nn.LayerNorm
    layer_norm2: nn.LayerNorm
    self_attn: SiglipAttention
    mlp: nn.Module


def packed_layers(
    layers: Iterable[SiglipLayer], states: Tensor, implementation: str, attended: Mapping[str, Any]
) -> Tensor:
    """`states (1, patches, C)` after the layers, with attention within segments.

    A fused layer has a forward of its own, which takes the boundaries.
    """
    for layer in layers:
        if fused := vars(layer).get("forward"):
            states = fused(states, **attended)
            continue
        states = states + _attention(layer.self_attn, layer.layer_norm1(states), implementation, attended)
        states = states + layer.mlp(layer.layer_norm2(states))
    return states


def _attention(module: SiglipAttention, states: Tensor, implementation: str, attended: Mapping[str, Any]) -> Tensor:
    """The stock module keeps the boundaries from attention, so its projections are called one by one."""
    query, key, value = (
        projection(states).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    rows, _ = ALL_ATTENTION_FUNCTIONS[implementation](
        module, query, key, value, None, scaling=module.scale, dropout=0.0, is_causal=False, **attended
    )
    return module.out_proj(rows.flatten(2))  # type: ignore[no-any-return]


def masked_states(tower: Any, layers: Iterable[nn.Module], tiles: Tensor, attended: Tensor) -> Tensor:  # noqa: ANN401 - typed in part only
    """States of SigLIP's layers on tiles of which only some patches, `attended (tiles, rows, columns)`, are keys."""
    states: Tensor = tower.embeddings(pixel_values=tiles, patch_attention_mask=attended)
    mask = _mask_of_keys(attended, states.dtype)
    for layer in layers:
        states = layer(states, mask)
    return states


def _mask_of_keys(attended: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to attention scores, `(units, 1, N, N)`; `attended` is for patches, `(units, rows, columns)`.

    Attention layers would make it of booleans again and again.
    """
    keys = attended.flatten(1)
    added = torch.zeros_like(keys, dtype=dtype).masked_fill(~keys, -torch.inf)
    return added[:, None, None].expand(-1, 1, keys.shape[1], -1)
