"""Weights that checkpoints store in float8 (e4m3) with scales, as ModelOpt of NVIDIA and compressed-tensors write them.

Next to `NAME.weight` lie `NAME.weight_scale`, one number or one for each output channel in a float type, and perhaps
`NAME.input_scale`, which is not read, as products are not computed in float8. Layers that were not quantised have
neither.
"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from vitwire_server.towers.family import Module, Weights

STORED = torch.float8_e4m3fn
_WEIGHT, _SCALE, _INPUT = ".weight", ".weight_scale", ".input_scale"
_SMALLEST, _LARGEST = 2.0**-100, 2.0**100
"""Scales outside of these would leave the normal numbers of bfloat16."""


def name_in(module: Module, key: str, keys: Collection[str]) -> str | None:
    """As `Module.name`, for scales by the name of their weight; None for scales of inputs."""
    for suffix in (_SCALE, _INPUT):
        weight = key.removesuffix(suffix) + _WEIGHT
        if key.endswith(suffix) and weight in keys:
            named = module.name(weight)
            return named.removesuffix(_WEIGHT) + _SCALE if named and suffix == _SCALE else None
    return module.name(key)


def dequantised(weights: Mapping[str, Tensor]) -> Weights:
    """Weights without their scales; those in float8 become float32.

    Raises ValueError over a weight in float8 without scales that fit it, and over scales of another weight.
    """
    scaled = {name for name in weights if name.removesuffix(_SCALE) + _WEIGHT in weights and name.endswith(_SCALE)}
    found = Weights()
    for name, weight in weights.items():
        if name in scaled:
            continue
        own = name.removesuffix(_WEIGHT) + _SCALE
        if weight.dtype is STORED and own not in scaled:
            raise ValueError(f"{name} is quantised ({weight.dtype}), but has no {own.rpartition('.')[2]}")
        if weight.dtype is not STORED and own in scaled:
            raise ValueError(f"{own} scales a weight of type {weight.dtype}, not float8")
        found[name] = weight
        if own in scaled:
            found[name] = weight.float() * _of_shape(weights[own], weight, own)
    return found


def _of_shape(scale: Tensor, weight: Tensor, name: str) -> Tensor:
    """A scale, or one for each output channel, in the shape of the weight and float32. Raises ValueError."""
    shape = tuple(scale.shape)
    if not scale.is_floating_point() or (scale.numel() != 1 and shape not in ((len(weight),), (len(weight), 1))):
        form = f"{scale.dtype} of shape {shape}"
        raise ValueError(f"{name} is {form}, but must be one number, or one for each of {len(weight)} channels")
    exact = scale.float().reshape(-1, *[1] * (weight.ndim - 1))
    if not bool(((exact >= _SMALLEST) & (exact <= _LARGEST)).all()):
        raise ValueError(f"{name} must be positive and finite")
    return exact.expand(weight.shape)
