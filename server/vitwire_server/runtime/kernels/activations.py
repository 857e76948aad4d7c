"""Activations of MLPs, gated or not, as one kernel."""

import torch
import triton
from torch import Tensor
from triton import language as tl

KINDS = {"gelu_pytorch_tanh": 0, "gelu": 1, "quick_gelu": 2, "silu": 3}
"""Names of activations in transformers' configurations."""
_BLOCK = 1024


def activate(values: Tensor, kind: str, *, gated: bool = False) -> Tensor:
    """The activation of `values (rows, columns)`, computed in float32; in place unless gated.

    If gated, multiplies the activation of the first half of the columns by the second half: `(rows, columns / 2)`.
    """
    rows, columns = values.shape
    out_columns = columns // 2 if gated else columns
    out = values.new_empty((rows, out_columns)) if gated else values
    _activate[rows, triton.cdiv(out_columns, _BLOCK)](
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
    if KIND == 0:
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == 1:
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif KIND == 2:
        y = x * tl.sigmoid(1.702 * x)
    else:
        y = x * tl.sigmoid(x)
    if GATED:
        # Round the activation before gating, as separate operations would.
        y = y.to(out_ptr.dtype.element_ty).to(tl.float32)
        y *= tl.load(in_ptr + row * in_columns + out_columns + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_columns + column, y.to(out_ptr.dtype.element_ty), mask=there)
