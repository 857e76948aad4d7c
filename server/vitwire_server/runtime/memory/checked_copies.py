"""Copies of rows that are checked on the way: where Triton runs, in one kernel."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from vitwire_server.runtime.toolchain import triton_fault


def copied_and_checked(parts: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> tuple[list[Tensor], Tensor]:
    """A copy of each of `parts (rows, width)` in its type, and whether each row of them is finite, `(all rows,)`."""
    if not parts or not parts[0].is_cuda or not _has_triton():
        copies = [part.to(dtype, copy=True) for part, dtype in zip(parts, dtypes, strict=True)]
        return copies, torch.cat([_finite(copy) for copy in copies])
    from vitwire_server.runtime.kernels.checks import copy_checked  # noqa: PLC0415 - triton comes with CUDA builds

    counts = [len(part) for part in parts]
    finite = torch.empty(sum(counts), dtype=torch.bool, device=parts[0].device)
    copies = [
        torch.empty(part.shape, dtype=dtype, device=part.device) for part, dtype in zip(parts, dtypes, strict=True)
    ]
    for part, copy, flags in zip(parts, copies, torch.split(finite, counts), strict=True):
        copy_checked(part, copy, flags)
    return copies, finite


@lru_cache
def _has_triton() -> bool:
    return not triton_fault()


def _finite(rows: Tensor) -> Tensor:
    """`(rows,)`: whether all values of each row are finite. aminmax takes one pass and propagates NaN."""
    low, high = torch.aminmax(rows, dim=1)
    return low.isfinite() & high.isfinite()
