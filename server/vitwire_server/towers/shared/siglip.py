"""SigLIP's towers: the module and its configuration, the layers of packed patches, and those with a mask."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitwire_server.towers.configs import Config, new_config
from vitwire_server.towers.family import Module, Weights, in_model
from vitwire_server.towers.layouts.patches import attend
from vitwire_server.towers.shared.fused import position_tables, split_qkv


def siglip(name: str) -> Module:
    """SigLIP's tower by this name, its weights within `vision_model.` or not; its pooling head is left out."""
    prefixes = in_model(f"{name}vision_model.", name)
    return Module(source="siglip.modeling_siglip:SiglipVisionModel", prefixes=prefixes, ignored=("head.",))


def siglip_of_blocks(prefixes: Mapping[str, str]) -> Module:
    """SigLIP's tower by timm's names, or by Moondream's, whose patches are embedded by a linear layer."""
    return Module(
        source="siglip.modeling_siglip:SiglipVisionModel",
        prefixes=prefixes,
        renames=(
            (r"^patch_emb(ed\.proj)?\.", "embeddings.patch_embedding."),
            (r"^pos_emb(ed)?$", "embeddings.position_embedding.weight"),
            (r"^(norm|post_ln)\.", "post_layernorm."),
            (r"^blocks\.", "encoder.layers."),
            (r"\.(norm|ln)([12])\.", r".layer_norm\2."),
            (r"\.attn\.proj\.", ".self_attn.out_proj."),
        ),
        ignored=("attn_pool.", "head.", "proj_mlp."),
        convert=_split_blocks,
    )


def _split_blocks(weights: Weights, vision: Config) -> Weights:
    kernel = (vision.num_channels, vision.patch_size, vision.patch_size)
    split = position_tables(split_qkv(weights, ".attn.qkv.", ".self_attn.{}_proj."))
    return {
        name: own.reshape(-1, *kernel) if name.endswith("patch_embedding.weight") else own
        for name, own in split.items()
    }


def siglip_config(vision: Mapping[str, object], *, width: int, dtype: str | None) -> Config:
    """A configuration that transformers has no class for: SigLIP's tower with these fields, and rows of this width."""
    return new_config(
        "deepseek_vl",
        vision_config={**vision, "vision_use_head": False},
        text_config={"model_type": "llama", "hidden_size": width},
        dtype=dtype,
    )


def packed_layers(layers: Iterable[Any], states: Tensor, implementation: str, attended: Mapping[str, Any]) -> Tensor:
    """`states (1, patches, C)` after stock layers of SigLIP 1 or 2, with attention within segments.

    A fused layer has a forward of its own, which takes the boundaries. A stock one keeps them from its attention, whose
    projections are called one by one.
    """
    for layer in layers:
        if "forward" in vars(layer):
            states = layer(states, **attended)
            continue
        module, normed = layer.self_attn, layer.layer_norm1(states)
        projections = (module.q_proj, module.k_proj, module.v_proj)
        heads = [projection(normed).unflatten(-1, (module.num_heads, -1)) for projection in projections]
        rows = attend(module, implementation, heads, scaling=module.scale, **attended)
        states = states + module.out_proj(rows.flatten(2))
        states = states + layer.mlp(layer.layer_norm2(states))
    return states


def masked_states(tower: Any, layers: Iterable[nn.Module], tiles: Tensor, attended: Tensor) -> Tensor:  # noqa: ANN401 - typed in part only
    """States of SigLIP's layers on tiles of which only some patches, `attended (tiles, rows, columns)`, are keys."""
    states: Tensor = tower.embeddings(pixel_values=tiles, patch_attention_mask=attended)
    keys = attended.flatten(1)
    # What is added to scores, `(tiles, 1, N, N)`: of booleans, each layer would make it again.
    added = torch.zeros_like(keys, dtype=states.dtype).masked_fill(~keys, -torch.inf)
    mask = added[:, None, None].expand(-1, 1, keys.shape[1], -1)
    for layer in layers:
        states = layer(states, mask)
    return states
