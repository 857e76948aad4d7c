"""A perceiver resampler: learned latents of each image attend to its patches and to each other."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.idefics2.modeling_idefics2 import (
    Idefics2PerceiverAttention,
    Idefics2PerceiverLayer,
    Idefics2PerceiverResampler,
)

Attention = Callable[..., tuple[Tensor, None]]
"""A backend of packed attention, as registered with transformers."""


class Places(NamedTuple):
    """Where patches and latents lie in the sequence of keys: behind the patches of each segment its latents."""

    patches: Tensor
    latents: Tensor
    """`(segments * latents,)`, segment after segment."""
    attended: Mapping[str, Any]
    """Keyword arguments of the attention of latents to those keys."""


def resampled(stock: Idefics2PerceiverResampler, context: Tensor, attended: Mapping[str, Any]) -> Tensor:
    """Rows of patches to latents `(segments * latents, width)`; every slot for a segment has its own."""
    places = _places(attended, len(context), stock.n_latents)
    latents = stock.latents.repeat(len(places.latents) // stock.n_latents, 1)
    layers: Any = stock.layers
    for layer in layers:
        latents = _layer(layer, latents, context, places)
    rows: Tensor = stock.norm(latents)
    return rows


def _places(attended: Mapping[str, Any], patches: int, own: int) -> Places:
    """On the device, with sizes that are known in advance: segment `n` begins behind `n` times the latents."""
    ends = attended["cu_seq_lens_k"]
    segments = torch.arange(len(ends), device=ends.device, dtype=ends.dtype)
    numbers = torch.arange(patches, device=ends.device, dtype=ends.dtype)
    shifted = numbers + torch.bucketize(numbers, ends[1:], right=True) * own
    firsts = ends[1:] + segments[:-1] * own
    latents = firsts[:, None] + torch.arange(own, device=ends.device)
    return Places(
        shifted,
        latents.flatten(),
        {
            "cu_seq_lens_q": segments * own,
            "cu_seq_lens_k": ends + segments * own,
            "max_length_q": own,
            "max_length_k": attended["max_length_k"] + own,
        },
    )


def _layer(layer: Idefics2PerceiverLayer, latents: Tensor, context: Tensor, places: Places) -> Tensor:
    """The stock layer, but for its attention."""
    queries = layer.input_latents_norm(latents)
    latents = latents + _attention(layer.self_attn, queries, layer.input_context_norm(context), places)
    rows: Tensor = latents + layer.mlp(layer.post_attention_layernorm(latents))
    return rows


def _attention(module: Idefics2PerceiverAttention, latents: Tensor, context: Tensor, places: Places) -> Tensor:
    """Keys that several query heads share are copied."""
    attend: Attention = ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation]  # noqa: SLF001

    def laid(part: nn.Linear) -> Tensor:
        whole = latents.new_empty(len(context) + len(latents), part.out_features)
        whole = whole.index_copy(0, places.patches, part(context)).index_copy(0, places.latents, part(latents))
        heads: Tensor = whole.unflatten(1, (-1, module.head_dim))
        return heads.repeat_interleave(module.num_heads // heads.shape[1], dim=1)

    query = module.q_proj(latents).unflatten(1, (-1, module.head_dim))
    query, key, value = (
        each.transpose(0, 1).unsqueeze(0) for each in (query, laid(module.k_proj), laid(module.v_proj))
    )
    rows, _ = attend(
        module, query, key, value, None, scaling=module.scaling, dropout=0.0, is_causal=False, **places.attended
    )
    attended: Tensor = module.o_proj(rows[0].flatten(1))
    return attended
