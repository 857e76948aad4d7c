"""Modules of a tower that compute the same faster: rewritten once, after the weights were loaded."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

_LINE = 64
"""Columns in half precision that fill a cache line of 128 bytes."""
_MLPS = (("gate_proj", "up_proj", "down_proj"), ("linear_fc1", "linear_fc2"), ("fc1", "fc2"))
"""Names of the linear layers of an MLP; all but the last have its inner columns. Of three, the first is the gate."""
_ACTIVATIONS = frozenset({"act_fn", "act", "activation_fn", "activation"})
Product: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Computes a product from rows, a weight and a bias."""


class PatchProjection(nn.Module):
    """A convolution whose kernel covers all of its input: one matrix product, which is far faster."""

    def __init__(self, convolution: nn.Conv2d | nn.Conv3d) -> None:
        super().__init__()
        self.convolution = convolution
        self.product: Product = functional.linear

    @property
    def weight(self) -> Tensor:
        """The kernel, whose dtype patch embeddings ask for."""
        return self.convolution.weight

    @property
    def matrix(self) -> Tensor:
        """The kernel as the weight of a product."""
        return self.weight.flatten(1)

    def forward(self, patches: Tensor) -> Tensor:
        """`(patches, C, ...)` of the kernel's size to `(patches, columns, 1, ...)`; what is larger is convolved."""
        if patches.shape[1:] != self.weight.shape[1:]:
            return self.convolution(patches)  # type: ignore[no-any-return]
        rows = self.product(patches.flatten(1), self.matrix, self.convolution.bias)
        return rows.view(*rows.shape, *([1] * (patches.ndim - 2)))


def linear_patches(model: nn.Module) -> int:
    """Rewrite patch embeddings that convolve one patch at a time; how many there were.

    Only for packed towers, which hand a convolution its patches one by one.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if not isinstance(parent, PatchProjection)
        and isinstance(child, nn.Conv2d | nn.Conv3d)
        and child.kernel_size == child.stride
        and child.groups == 1
    ]
    for parent, name, child in found:
        setattr(parent, name, PatchProjection(child))
    return len(found)


@torch.no_grad()
def aligned_mlps(model: nn.Module) -> int:
    """Widen MLPs whose inner rows do not begin at cache lines; how many there were.

    The new columns are zero, so they add nothing: `act(0)`, or `act(0) * 0`, times zero weights. Qwen2.5-VL's 3420
    columns cost three times what 3456 cost. With Qwen3-VL's 4304 instead of 4352 the second product of 784 rows takes a
    tenth longer.
    """
    found = 0
    for *inner, last in filter(None, map(_mlp_of, model.modules())):
        spare = -last.in_features % _LINE
        if spare and all(each.out_features == last.in_features for each in inner):
            for each in inner:
                _widen(each, (0, 0, 0, spare), (0, spare))
            _widen(last, (0, spare), (0, 0))
            found += 1
    return found


def _mlp_of(module: nn.Module) -> list[nn.Linear]:
    """The linear layers of an MLP between which zeros stay zero; empty if the module is something else."""
    parts = {name: part for name, part in module.named_children() if not isinstance(part, nn.Identity | nn.Dropout)}
    names = next((each for each in _MLPS if parts.keys() - _ACTIVATIONS == {*each}), ())
    layers = [layer for name in names if isinstance(layer := parts.pop(name), nn.Linear)]
    if not names or len(layers) < len(names):
        return []
    is_gated, activations = len(layers) > 2, list(parts.values())
    return layers if is_gated or (activations and not activations[0](torch.zeros(1)).any()) else []


def _widen(linear: nn.Linear, weight: tuple[int, ...], bias: tuple[int, ...]) -> None:
    linear.weight = nn.Parameter(functional.pad(linear.weight, weight), requires_grad=False)
    if linear.bias is not None:
        linear.bias = nn.Parameter(functional.pad(linear.bias, bias), requires_grad=False)
    linear.out_features, linear.in_features = linear.weight.shape
