"""float32 pixels rounded to the server's type, as torch rounds: half the bytes, and the same rows.

A server casts pixels to the type that its tower computes in before anything else, to the nearest, ties to even.
"""

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_BLOCK = 1 << 16
"""Values that are rounded at a time: scratch memory stays in the cache."""
_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_LARGEST = 0x7F7F_8000
"""The least float32, as bits, that bfloat16 rounds to infinity."""


def rounded(tensor: Any, dtype: str) -> Any | None:  # noqa: ANN401  # torch is not imported
    """A float32 array or tensor in `dtype`, bfloat16 as uint16 in numpy; None if it has to stay as it is.

    That is for other types, and for values that are not finite or would not be: the server names the fault.
    """
    if isinstance(tensor, np.ndarray):
        if tensor.dtype != np.float32:
            return None
        return _bfloat16(tensor) if dtype == "bfloat16" else _float16(tensor) if dtype == "float16" else None
    if str(tensor.dtype) != "torch.float32" or dtype not in ("bfloat16", "float16"):
        return None
    result = tensor.detach().to(getattr(sys.modules["torch"], dtype))
    return result if bool(result.isfinite().all()) else None


def _bfloat16(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16] | None:
    bits = np.ascontiguousarray(array, "<f4").view(np.uint32).reshape(-1)
    result = np.empty(bits.size, "<u2")
    scratch, odd = np.empty(_BLOCK, np.uint32), np.empty(_BLOCK, np.uint32)
    for start in range(0, bits.size, _BLOCK):
        block = bits[start : start + _BLOCK]
        up, last = scratch[: block.size], odd[: block.size]
        if np.bitwise_and(block, _MAGNITUDE, out=up).max() >= _LARGEST:
            return None
        np.right_shift(block, 16, out=last)
        np.bitwise_and(last, 1, out=last)
        np.add(block, 0x7FFF, out=up)
        np.add(up, last, out=up)
        np.right_shift(up, 16, out=up)
        result[start : start + block.size] = up
    return result.reshape(array.shape)


def _float16(array: npt.NDArray[np.float32]) -> npt.NDArray[np.float16] | None:
    with np.errstate(over="ignore", invalid="ignore"):
        result = array.astype("<f2")
    return result if bool(np.isfinite(result).all()) else None
