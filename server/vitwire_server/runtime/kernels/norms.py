"""Residual addition followed by layer or RMS norm."""

from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor, nn
from triton import language as tl

from vitwire_server.runtime.kernels.dependent import begin, end, is_dependent
from vitwire_server.runtime.kernels.launching import Kernel
from vitwire_server.runtime.kernels.operands import Scaled, power_of_two
from vitwire_server.runtime.kernels.quantise import empty_scaled, store_scaled, warps_of

_MOST_WARPS = 4
"""Of a program whose result stays in the tower's dtype."""


def add_norm(
    hidden: Tensor,
    added: Tensor | None,
    norm: nn.Module,
    ahead: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    factor: Tensor | None = None,
    overlapping: bool = False,
) -> tuple[Tensor, Tensor]:
    """`hidden + added`, rounded to their dtype, and its norm; `(rows, columns)` each, contiguous.

    `norm` is an `nn.LayerNorm`, or an RMS norm with `weight` and `eps`. Without `added`, the first result is `hidden`
    itself. `added` may be partial sums in float32, `(parts, rows, columns)`, and lack the `bias (columns,)` of their
    layer. `ahead (columns,)`, the bias of the next layer, is added to the first result only, before rounding.
    `factor (columns,)` multiplies what is added, with `bias` and without `ahead`.
    `overlapping` launches the kernel while the one before it runs, where the device can.
    """
    normed, dependent = torch.empty_like(hidden), overlapping and is_dependent(hidden.device)
    options: Any = {"num_warps": min(_MOST_WARPS, warps_of(*hidden.shape)), "DEPENDENT": dependent}
    if dependent:
        options["launch_pdl"] = True
    return _launched(hidden, added, norm, normed, (bias, factor, ahead), options), normed


def add_norm_quantise(
    hidden: Tensor, added: Tensor | None, norm: nn.Module, ahead: Tensor | None = None
) -> tuple[Tensor, Scaled]:
    """As `add_norm`, with the normed rows in float8."""
    normed = empty_scaled(hidden, hidden.shape[1])
    options = {"num_warps": warps_of(*hidden.shape), "DEPENDENT": False}
    return _launched(hidden, added, norm, normed, (None, None, ahead), options), normed


def _launched(
    hidden: Tensor,
    added: Tensor | None,
    norm: nn.Module,
    normed: Tensor | Scaled,
    by_column: tuple[Tensor | None, Tensor | None, Tensor | None],
    options: Mapping[str, Any],
) -> Tensor:
    """Fill `normed`; returns the sum. `by_column` are `bias`, `factor` and `ahead`."""
    bias, factor, ahead = by_column
    assert added is not None or bias is factor is ahead is None
    rows, columns = hidden.shape
    summed = torch.empty_like(hidden) if added is not None else hidden
    out, scales = normed if isinstance(normed, Scaled) else (normed, None)
    _add_norm[(rows,)](
        hidden,
        added,
        summed if added is not None else None,
        out,
        scales,
        norm.weight,
        getattr(norm, "bias", None),
        bias,
        factor,
        ahead,
        epsilon(norm),
        COUNT=columns,
        COLUMNS=power_of_two(columns),
        PARTS=0 if added is None else len(added) if added.dim() > 2 else 1,
        CENTRE=isinstance(norm, nn.LayerNorm),
        **options,
    )
    return summed


def epsilon(norm: nn.Module) -> float:
    """The epsilon of a norm."""
    for name in ("eps", "variance_epsilon"):
        if isinstance(value := getattr(norm, name, None), float):
            return value
    raise ValueError(f"{type(norm).__name__} has no epsilon")


@triton.jit
def _total(parts_ptr, stride, column, there, PARTS: tl.constexpr):
    """The sum of one row's parts, which are `stride` values apart."""
    total = tl.load(parts_ptr + column, mask=there, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts_ptr + part * stride + column, mask=there, other=0.0).to(tl.float32)
    return total


@Kernel
@triton.jit
def _add_norm(
    hidden_ptr,
    added_ptr,
    summed_ptr,
    normed_ptr,
    scales_ptr,
    weight_ptr,
    shift_ptr,
    bias_ptr,
    factor_ptr,
    ahead_ptr,
    epsilon,
    COUNT: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    CENTRE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)
    there = column < COUNT
    row = tl.program_id(0).to(tl.int64)
    at = row * COUNT + column
    begin(DEPENDENT)
    values = tl.load(hidden_ptr + at, mask=there, other=0.0).to(tl.float32)
    if PARTS:
        stride = tl.num_programs(0).to(tl.int64) * COUNT
        added = _total(added_ptr + row * COUNT, stride, column, there, PARTS)
        if bias_ptr is not None:
            added += tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)
        if factor_ptr is not None:
            added *= tl.load(factor_ptr + column, mask=there, other=0.0).to(tl.float32)
        values += added
    end(DEPENDENT)
    if PARTS:
        summed = values
        if ahead_ptr is not None:
            summed += tl.load(ahead_ptr + column, mask=there, other=0.0).to(tl.float32)
        tl.store(summed_ptr + at, summed.to(summed_ptr.dtype.element_ty), mask=there)
        values = values.to(summed_ptr.dtype.element_ty).to(tl.float32)
    if CENTRE:
        mean = tl.sum(values, 0) / COUNT
        values = tl.where(there, values - mean, 0.0)
    scaled = values * tl.rsqrt(tl.sum(values * values, 0) / COUNT + epsilon)
    weight = tl.load(weight_ptr + column, mask=there, other=0.0).to(tl.float32)
    if not CENTRE and scales_ptr is None:
        # The models' RMS norms round before scaling.
        scaled = scaled.to(normed_ptr.dtype.element_ty).to(tl.float32)
    scaled *= weight
    if shift_ptr is not None:
        scaled += tl.load(shift_ptr + column, mask=there, other=0.0).to(tl.float32)
    if scales_ptr is not None:
        store_scaled(scaled, normed_ptr, scales_ptr, row, column, there, COUNT)
    else:
        tl.store(normed_ptr + at, scaled.to(normed_ptr.dtype.element_ty), mask=there)
