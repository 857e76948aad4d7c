"""Weights as authors store them, in the form that transformers' modules hold."""

from collections.abc import Callable

from torch import Tensor

from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Weights


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
    """Of each head the even rows, then the odd ones: transformers rotates columns half a head apart, authors pairs."""
    halves: Tensor = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return halves
