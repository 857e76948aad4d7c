"""Residual addition followed by layer or RMS norm."""

import torch
import triton
from torch import Tensor, nn
from triton import language as tl


def add_norm(
    hidden: Tensor, added: Tensor | None, norm: nn.Module, ahead: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`hidden + added`, rounded to their dtype, and its norm; `(rows, columns)` each, contiguous.

    `norm` is an `nn.LayerNorm`, or an RMS norm with `weight` and `eps`. Without `added`, the first result is `hidden`
    itself. `ahead (columns,)`, the bias of the next layer, is added to the first result only, before rounding.
    """
    assert added is not None or ahead is None
    rows, columns = hidden.shape
    weight: Tensor = norm.weight  # type: ignore[assignment]
    bias = getattr(norm, "bias", None)
    summed = torch.empty_like(hidden) if added is not None else hidden
    normed = torch.empty_like(hidden)
    _add_norm[(rows,)](
        hidden,
        hidden if added is None else added,
        summed,
        normed,
        weight,
        weight if bias is None else bias,
        weight if ahead is None else ahead,
        epsilon(norm),
        COUNT=columns,
        COLUMNS=triton.next_power_of_2(columns),
        ADD=added is not None,
        CENTRE=isinstance(norm, nn.LayerNorm),
        BIAS=bias is not None,
        AHEAD=ahead is not None,
        num_warps=4,
    )
    return summed, normed


def epsilon(norm: nn.Module) -> float:
    """The epsilon of a norm."""
    for name in ("eps", "variance_epsilon"):
        if isinstance(value := getattr(norm, name, None), float):
            return value
    raise ValueError(f"{type(norm).__name__} has no epsilon")


@triton.jit
def _add_norm(
    hidden_ptr,
    added_ptr,
    summed_ptr,
    normed_ptr,
    weight_ptr,
    bias_ptr,
    ahead_ptr,
    epsilon,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
    CENTRE: tl.constexpr,
    BIAS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)
    there = column < COUNT
    at = tl.program_id(0).to(tl.int64) * COUNT + column
    values = tl.load(hidden_ptr + at, mask=there, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(added_ptr + at, mask=there, other=0.0).to(tl.float32)
        summed = values
        if AHEAD:
            summed += tl.load(ahead_ptr + column, mask=there, other=0.0).to(tl.float32)
        tl.store(summed_ptr + at, summed.to(summed_ptr.dtype.element_ty), mask=there)
        values = values.to(summed_ptr.dtype.element_ty).to(tl.float32)
    if CENTRE:
        mean = tl.sum(values, 0) / COUNT
        values = tl.where(there, values - mean, 0.0)
    scaled = values * tl.rsqrt(tl.sum(values * values, 0) / COUNT + epsilon)
    weight = tl.load(weight_ptr + column, mask=there, other=0.0).to(tl.float32)
    if not CENTRE:
        # The models' RMS norms round before scaling.
        scaled = scaled.to(normed_ptr.dtype.element_ty).to(tl.float32)
    scaled *= weight
    if BIAS:
        scaled += tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)
    tl.store(normed_ptr + at, scaled.to(normed_ptr.dtype.element_ty), mask=there)
