"""Linear layers in float8: weights with a scale per output channel, rows with a scale each.

A value keeps 3 bits of mantissa (e4m3): it is rounded by at most 1/16 of itself or, if it is 28,000 times smaller than
the largest of its row, by 2^-10 of the row's scale. As each row has a scale, neither a large value nor NaN
changes another row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitwire_server.runtime.kernels.operands import FLOAT8, LARGEST, SMALLEST, Scaled
from vitwire_server.towers.rewrites import STORED_SCALES

_ALIGNED = 16
"""The product takes rows and channels in multiples of this."""
_AFTER_ATTENTION = frozenset({"proj", "o_proj", "out_proj", "projection_layer"})
"""Names of the layer that follows attention. It stays in the tower's dtype: quantising its rows would take the time
that a product in float8 saves."""
_FIRST_DEVICE = (8, 9)
"""The compute capability of the first devices with float8 products, Ada."""


def quantised(rows: Tensor) -> Scaled:
    """Rows `(rows, columns)`, each scaled by its largest absolute value."""
    if rows.is_cuda:
        from vitwire_server.runtime.kernels.quantise import quantise  # noqa: PLC0415 - triton comes with CUDA

        return quantise(rows)
    exact = rows.float()
    scales = exact.abs().amax(1, keepdim=True).clamp(min=SMALLEST) / LARGEST
    return Scaled((exact / scales).to(FLOAT8), scales)


class Float8Linear(nn.Module):
    """A linear layer whose product is computed in float8. Its result has the dtype of the layer that it replaces."""

    fast: bool = True
    """Sum products in what Hopper's tensor cores hold, which is faster and less than float32."""
    weight: None = None
    """T5's layers bring their input to the weight's type if there is one."""

    def __init__(self, weight: Scaled, bias: Tensor | None, dtype: torch.dtype) -> None:
        """`weight` has a scale for each output channel; `dtype` is that of the result."""
        super().__init__()
        self.out_features, self.in_features = weight.values.shape
        self.bias = bias
        self._dtype = dtype
        self.values: Tensor
        self.scales: Tensor
        self.register_buffer("values", weight.values)
        self.register_buffer("scales", weight.scales)

    @classmethod
    def of(cls, linear: nn.Linear) -> "Float8Linear":
        """The same layer in float8; if its checkpoint stores it so, with the values and scales stored there."""
        scales: Tensor | None = getattr(linear, STORED_SCALES, None)
        if scales is None:
            return cls(quantised(linear.weight), linear.bias, linear.weight.dtype)
        # Rounding to bfloat16 moved the products by 2^-9 of themselves, so the nearest float8 is the stored value.
        values = (linear.weight.float() / scales).to(FLOAT8)
        return cls(Scaled(values, scales), linear.bias, linear.weight.dtype)

    @classmethod
    def joined(cls, *layers: "Float8Linear") -> "Float8Linear":
        """One layer with the channels of several, whose weights become views of its own."""
        weight = Scaled(torch.cat([each.values for each in layers]), torch.cat([each.scales for each in layers]))
        biases = [each.bias for each in layers if each.bias is not None]
        if len(biases) not in (0, len(layers)):
            raise ValueError("only some of the joined layers have a bias")
        widths = [each.out_features for each in layers]
        for each, values, scales in zip(layers, weight.values.split(widths), weight.scales.split(widths), strict=True):
            each.values, each.scales = values, scales
        return cls(weight, torch.cat(biases) if biases else None, layers[0]._dtype)  # noqa: SLF001 - its own class

    def forward(self, rows: Tensor | Scaled) -> Tensor:
        """The layer applied to `rows`, of which only what is not `Scaled` may have more than two dimensions."""
        if isinstance(rows, Scaled):
            return self.product(rows, biased=True)
        return self.product(quantised(rows.flatten(0, -2)), biased=True).view(*rows.shape[:-1], self.out_features)

    def product(self, rows: Scaled, *, biased: bool) -> Tensor:
        """Rows times weights, with or without the bias."""
        return torch._scaled_mm(  # noqa: SLF001 - the public name of the same, scaled_mm, is newer than 2.11
            rows.values,
            self.values.t(),
            scale_a=rows.scales,
            scale_b=self.scales.t(),
            bias=self.bias if biased else None,
            out_dtype=self._dtype,
            use_fast_accum=self.fast,
        )


def device_fault(device: torch.device) -> str:
    """Why a device cannot compute float8 products; empty if it can."""
    if device.type != "cuda":
        return ""
    found = torch.cuda.get_device_capability(device)
    if found >= _FIRST_DEVICE:
        return ""
    name, least = torch.cuda.get_device_name(device), ".".join(map(str, _FIRST_DEVICE))
    return f"{name} has no float8 products (compute capability {found[0]}.{found[1]}, {least} is needed)"


@dataclass(frozen=True, slots=True)
class Replacement:
    """A linear layer of a block, and the same layer in float8."""

    parent: nn.Module
    name: str
    of_attention: bool
    """True if it projects to queries, keys or values; else it is the MLP's."""
    exact: nn.Linear
    reduced: Float8Linear

    @property
    def is_stored(self) -> bool:
        """True if the checkpoint stores the layer in float8."""
        return hasattr(self.exact, STORED_SCALES)

    def use(self, *, reduced: bool) -> None:
        """Compute the layer in float8, or exactly."""
        setattr(self.parent, self.name, self.reduced if reduced else self.exact)


@torch.no_grad()
def replacements(block: nn.Module) -> list[Replacement]:
    """The linear layers of a tower's block that can be reduced, but for the one after attention; none is exchanged."""
    return [
        Replacement(parent, name, "att" in path or "qkv" in name, child, Float8Linear.of(child))
        for path, parent in block.named_modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
        and _AFTER_ATTENTION.isdisjoint((*path.split(".")[-1:], name))
        and not (child.in_features % _ALIGNED or child.out_features % _ALIGNED)
    ]


def reduce(block: nn.Module) -> int:
    """Replace the linear layers of a tower's block, but for the one after attention; returns their number."""
    found = replacements(block)
    for each in found:
        each.use(reduced=True)
    return len(found)


def is_reduced(block: nn.Module) -> bool:
    """True if a layer of this block is in float8."""
    return any(isinstance(part, Float8Linear) for part in block.modules())
