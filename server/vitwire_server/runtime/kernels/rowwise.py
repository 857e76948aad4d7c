"""Kernels with programs of one row each: activations, checked copies, containment of NaN, learned positions."""

import torch
import triton
from torch import Tensor
from triton import language as tl

from vitwire_server.runtime.kernels.launching import Kernel
from vitwire_server.runtime.kernels.operands import power_of_two

KINDS = {"gelu_pytorch_tanh": 0, "gelu": 1, "quick_gelu": 2, "silu": 3}
"""Names of activations in transformers' configurations."""
_BLOCK, _COLUMNS = 1024, 2048


def activate(values: Tensor, kind: str, *, gated: bool = False) -> Tensor:
    """The activation of `values (rows, columns)`, computed in float32; in place unless gated.

    If gated, multiplies the activation of the first half of the columns by the second half: `(rows, columns / 2)`.
    """
    rows, columns = values.shape
    out_columns = columns // 2 if gated else columns
    out = values.new_empty((rows, out_columns)) if gated else values
    _activate[rows, -(-out_columns // _BLOCK)](
        values, out, columns, out_columns, KIND=KINDS[kind], GATED=gated, BLOCK=_BLOCK, num_warps=4
    )
    return out


def activation_name(module: torch.nn.Module) -> str | None:
    """Which of `KINDS` a module computes, if any."""
    if isinstance(module, torch.nn.GELU):
        return "gelu_pytorch_tanh" if module.approximate == "tanh" else "gelu"
    names = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_pytorch_tanh", "GELUActivation": "gelu"}
    names |= {"QuickGELUActivation": "quick_gelu", "PytorchGELUTanh": "gelu_pytorch_tanh"}
    return names.get(type(module).__name__)


@triton.jit
def activation(x, KIND: tl.constexpr) -> tl.tensor:
    """The activation of float32 values."""
    if KIND == 0:
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == 1:
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:
        y = x * tl.sigmoid(1.702 * x)
    else:
        y = x * tl.sigmoid(x)
    return y


@Kernel
@triton.jit
def _activate(
    in_ptr,
    out_ptr,
    in_columns,
    out_columns,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < out_columns
    x = tl.load(in_ptr + row * in_columns + column, mask=there, other=0.0).to(tl.float32)
    y = activation(x, KIND)
    if GATED:
        # Round the activation before gating, as separate operations would.
        y = y.to(out_ptr.dtype.element_ty).to(tl.float32)
        y *= tl.load(in_ptr + row * in_columns + out_columns + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_columns + column, y.to(out_ptr.dtype.element_ty), mask=there)


def copy_checked(rows: Tensor, out: Tensor, finite: Tensor) -> None:
    """Copy `rows (count, width)` to `out`, converted to its type.

    `finite (count,)` bool says which copies have neither NaN nor infinity. Rows may be strided, their columns not.
    """
    count, width = rows.shape
    if count:
        _copy_checked[(count,)](
            rows, out, finite, width, rows.stride(0), out.stride(0), COLUMNS=_COLUMNS, num_warps=8
        )  # fmt: skip


@Kernel
@triton.jit
def _copy_checked(rows_ptr, out_ptr, finite_ptr, width, row_stride, out_stride, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    lost = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, width, COLUMNS):
        there = start + column < width
        values = tl.load(rows_ptr + row * row_stride + start + column, mask=there, other=0.0)
        copied = values.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * out_stride + start + column, copied, mask=there)
        lost |= ((tl.abs(copied.to(tl.float32)) < float("inf")) == 0).to(tl.int32)
    tl.store(finite_ptr + row, tl.max(lost, 0) == 0)


def contain(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values `(rows, heads, head_dim)` with which NaN and infinity stay in their segment.

    Flash attention reads whole blocks of keys, including those of the next segment, and masks their weights to 0; but
    0 * NaN is NaN. Here a value that is not finite becomes 0 and its key NaN: queries of its segment get NaN from their
    scores, while scores of other segments are masked before they are used. Heads of a row must be contiguous; rows
    may be strided. Both results are new and contiguous.
    """
    rows, heads, head_dim = k.shape
    assert k.stride(1) == v.stride(1) == head_dim
    keys, values = (torch.empty((rows, heads, head_dim), dtype=each.dtype, device=each.device) for each in (k, v))
    _contain[(rows,)](
        k,
        v,
        keys,
        values,
        k.stride(0),
        v.stride(0),
        HEADS=heads,
        HEAD_DIM=head_dim,
        LINES=power_of_two(heads),
        COLUMNS=power_of_two(head_dim),
        num_warps=4,
    )
    return keys, values


@Kernel
@triton.jit
def _contain(
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    k_row,
    v_row,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = tl.arange(0, LINES)
    column = tl.arange(0, COLUMNS)
    there = (line < HEADS)[:, None] & (column < HEAD_DIM)[None, :]
    at = line[:, None] * HEAD_DIM + column[None, :]
    out = row * (HEADS * HEAD_DIM) + at
    k = tl.load(k_ptr + row * k_row + at, mask=there, other=0.0)
    v = tl.load(v_ptr + row * v_row + at, mask=there, other=0.0)
    lost = (tl.abs(v.to(tl.float32)) < float("inf")) == 0
    key_lost = (tl.max(lost.to(tl.int32), 1) > 0)[:, None]
    tl.store(keys_ptr + out, tl.where(key_lost, float("nan"), k).to(keys_ptr.dtype.element_ty), mask=there)
    tl.store(values_ptr + out, tl.where(lost, 0.0, v).to(values_ptr.dtype.element_ty), mask=there)


def interpolated(table: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """The sum of `taps` rows of `table (positions, columns)`, weighted, for each patch: `(patches, columns)`.

    `indices` and `weights (patches, taps)`; summed in float32 and rounded once. All are contiguous.
    """
    patches, taps = indices.shape
    columns = table.shape[1]
    out = torch.empty((patches, columns), dtype=table.dtype, device=table.device)
    _interpolated[(patches,)](
        table, indices, weights, out, columns, TAPS=taps, COLUMNS=power_of_two(columns), num_warps=4
    )
    return out


@Kernel
@triton.jit
def _interpolated(table_ptr, indices_ptr, weights_ptr, out_ptr, columns, TAPS: tl.constexpr, COLUMNS: tl.constexpr):
    patch = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    there = column < columns
    sums = tl.zeros([COLUMNS], tl.float32)
    for tap in tl.static_range(TAPS):
        row = tl.load(indices_ptr + patch * TAPS + tap).to(tl.int64)
        weight = tl.load(weights_ptr + patch * TAPS + tap).to(tl.float32)
        sums += weight * tl.load(table_ptr + row * columns + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + patch * columns + column, sums.to(out_ptr.dtype.element_ty), mask=there)
