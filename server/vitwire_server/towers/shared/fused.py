"""Weights as authors store them, in the form that modules hold: fused projections, tables, grouped queries."""

from collections.abc import Callable

import torch
from torch import Tensor

from vitwire_server.towers.configs import Config, changed
from vitwire_server.towers.family import Weights

SHARED_BY = "queries_of_a_key"
"""Field of a tower's changed configuration: the number of query heads that share a key head."""


def split_qkv(weights: Weights, fused: str, apart: str) -> Weights:
    """Query, key and value of one tensor as three: `fused` in its name becomes `apart`, whose `{}` is q, k or v."""
    split: Weights = {}
    for name, tensor in weights.items():
        if fused in name:
            parts = zip("qkv", tensor.chunk(3), strict=True)
            split |= {name.replace(fused, apart.format(letter)): own for letter, own in parts}
        else:
            split[name] = tensor
    return split


def unfused(fused: str, apart: str) -> Callable[[Weights, Config], Weights]:
    """A conversion that only splits query, key and value."""
    return lambda weights, _: split_qkv(weights, fused, apart)


def position_tables(weights: Weights) -> Weights:
    """Learned positions as the table of an embedding, without an axis for a batch."""
    return {
        name: own.flatten(0, -2) if name.endswith("position_embedding.weight") else own for name, own in weights.items()
    }


def rotary_halves(rows: Tensor, heads: int) -> Tensor:
    """Each head's even rows, then its odd ones: transformers rotates columns half a head apart, authors pairs."""
    halves: Tensor = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return halves


def halved(fused: str) -> Callable[[Weights, Config], Weights]:
    """A conversion of `[queries | keys | values]`, `fused` in their names: `rotary_halves` of queries and keys."""

    def turned(own: Tensor, heads: int) -> Tensor:
        queries, keys, values = own.chunk(3)
        return torch.cat([rotary_halves(queries, heads), rotary_halves(keys, heads), values])

    return lambda weights, config: {
        name: turned(own, config.num_attention_heads) if fused in name else own for name, own in weights.items()
    }


def ungrouped(config: Config) -> Config:
    """A configuration whose tower has as many key heads as query heads, which attention here needs.

    Raises AttributeError or ZeroDivisionError.
    """
    own = config.vision_config
    shared_by = own.num_attention_heads // own.num_key_value_heads
    heads = {SHARED_BY: shared_by, "num_key_value_heads": own.num_attention_heads}
    return changed(config, {f"vision_config.{name}": value for name, value in heads.items()})


def copied(rows: Tensor, config: Config) -> Tensor:
    """Rows of a key or value projection, each head as often as queries share it; `config` is the changed tower's."""
    side = config.hidden_size // config.num_attention_heads
    heads: Tensor = rows.unflatten(0, (-1, side))
    return heads.repeat_interleave(getattr(config, SHARED_BY), dim=0).flatten(0, 1)
