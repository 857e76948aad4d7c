"""Residual addition followed by layer or RMS norm."""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor, nn
from triton import language as tl

from vitwire_server.runtime.kernels.dependent import begin, constants_of, end, is_dependent
from vitwire_server.runtime.kernels.launching import Bound, Kernel
from vitwire_server.runtime.kernels.operands import power_of_two

_MANY_ROWS, _NARROW = 1024, 2048
"""From `_MANY_ROWS` rows on, rows of up to `_NARROW` columns take one warp each, others four."""


class Norm(NamedTuple):
    """The weights of a layer or RMS norm."""

    weight: Tensor
    shift: Tensor | None
    epsilon: float
    centres: bool

    @classmethod
    def of(cls, module: nn.Module) -> "Norm":
        """From an `nn.LayerNorm`, or an RMS norm with `weight` and `eps`. Raises ValueError, AttributeError."""
        found = (getattr(module, name, None) for name in ("eps", "variance_epsilon"))
        epsilon = next((each for each in found if isinstance(each, float)), None)
        if epsilon is None:
            raise ValueError(f"{type(module).__name__} has no epsilon")
        weight: Tensor = module.weight  # type: ignore[assignment]
        return cls(weight, getattr(module, "bias", None), epsilon, isinstance(module, nn.LayerNorm))


def add_norm(
    hidden: Tensor,
    added: Tensor | None,
    norm: Norm,
    ahead: Tensor | None = None,
    *,
    factor: Tensor | None = None,
    overlapping: bool = False,
) -> tuple[Tensor, Tensor]:
    """`hidden + added`, rounded to their dtype, and its norm; `(rows, columns)` each, contiguous.

    Without `added`, the first result is `hidden` itself. `ahead (columns,)`, the bias of the next layer, is added to
    the first result only, before rounding. `factor (columns,)` multiplies what is added, without `ahead`.
    `overlapping` launches the kernel while the one before it runs, where the device can.
    """
    assert added is not None or (factor is None and ahead is None), "columns are for what is added"
    rows, columns = hidden.shape
    weight, shift, epsilon, centres = norm
    normed = torch.empty_like(hidden)
    summed = None if added is None else torch.empty_like(hidden)
    warps = 1 if rows >= _MANY_ROWS and columns <= _NARROW else 4
    launch = _bound(columns, added is not None, centres, warps, overlapping and is_dependent(hidden.device))
    launch((rows,), hidden, added, summed, normed, weight, shift, factor, ahead, epsilon)
    return hidden if summed is None else summed, normed


@lru_cache
def _bound(columns: int, adds: bool, centres: bool, warps: int, dependent: bool) -> Bound:
    """The kernel for rows of this width, with something to add or without."""
    options = {"num_warps": warps, **constants_of(dependent)}
    return _add_norm.bound(COUNT=columns, COLUMNS=power_of_two(columns), ADDS=adds, CENTRE=centres, **options)


@Kernel
@triton.jit
def _add_norm(
    hidden_ptr,
    added_ptr,
    summed_ptr,
    normed_ptr,
    weight_ptr,
    shift_ptr,
    factor_ptr,
    ahead_ptr,
    epsilon,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADDS: tl.constexpr,
    CENTRE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)
    there = column < COUNT
    row = tl.program_id(0).to(tl.int64)
    at = row * COUNT + column
    begin(DEPENDENT)
    values = tl.load(hidden_ptr + at, mask=there, other=0.0).to(tl.float32)
    if ADDS:
        added = tl.load(added_ptr + at, mask=there, other=0.0).to(tl.float32)
        if factor_ptr is not None:
            added *= tl.load(factor_ptr + column, mask=there, other=0.0).to(tl.float32)
        values += added
    end(DEPENDENT)
    if ADDS:
        summed = values
        if ahead_ptr is not None:
            summed += tl.load(ahead_ptr + column, mask=there, other=0.0).to(tl.float32)
        tl.store(summed_ptr + at, summed.to(summed_ptr.dtype.element_ty), mask=there)
        values = values.to(summed_ptr.dtype.element_ty).to(tl.float32)
    if CENTRE:
        mean = tl.sum(values, 0) / COUNT
        values = tl.where(there, values - mean, 0.0)
    normed = values * tl.rsqrt(tl.sum(values * values, 0) / COUNT + epsilon)
    weight = tl.load(weight_ptr + column, mask=there, other=0.0).to(tl.float32)
    if not CENTRE:
        # The models' RMS norms round before they apply the weight.
        normed = normed.to(normed_ptr.dtype.element_ty).to(tl.float32)
    normed *= weight
    if shift_ptr is not None:
        normed += tl.load(shift_ptr + column, mask=there, other=0.0).to(tl.float32)
    tl.store(normed_ptr + at, normed.to(normed_ptr.dtype.element_ty), mask=there)
