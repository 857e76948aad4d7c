"""Items as they are sent: bytes in host memory, without repeated frames, rounded to the server's type.

A server casts pixels to the type that its tower computes in before anything else, to the nearest, ties to even. So
float32 pixels are rounded here, as torch rounds: half the bytes, and the same rows.
"""

import sys
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vitwire._inputs.tensors import DATA_TYPES, Array, Pixels, Tensor, TorchTensor, type_name
from vitwire.items import MODALITIES, Item, bytes_of
from vitwire.options import ProcessorOptions
from vitwire.v1 import encoder_pb2 as pb
from vitwire.wire import ItemTensors

_BLOCK = 1 << 16
"""Values that are rounded at a time: scratch memory stays in the cache."""
_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_LARGEST = 0x7F7F_8000
"""The least float32, as bits, that bfloat16 rounds to infinity."""


class Patch(NamedTuple):
    """The axes of a patch, `(C, T, p*p)`."""

    channels: int
    frames: int
    area: int


class WireItem(NamedTuple):
    """An item ready to send: the message without the bytes of its tensors, and views of those bytes."""

    message: pb.Item
    tensors: ItemTensors

    @property
    def size(self) -> int:
        """Bytes of the tensors, or of the file."""
        return sum(map(len, self.tensors))


def to_wire(item: Item, dtype: str = "float32", patch: Patch | None = None, *, store_only: bool = False) -> WireItem:
    """Copies only what is not in host memory, little-endian and in C order, repeats frames, or is rounded.

    dtype: of the server's tower, which float32 is rounded to.
    patch: of the tower; equal frames of an image are sent once.
    """
    t, h, w = item.grid
    options = ProcessorOptions.of(item.options)
    message = pb.Item(
        modality=MODALITIES[item.modality],
        grid=pb.Grid(t=t, h=h, w=w) if any(item.grid) else None,
        content_id=item.content_id or "",
        keep_ratio=item.keep_ratio,
        store_only=store_only,
        options=pb.ProcessorOptions(**options.given()) if options else None,
    )
    pixels = crops = memoryview(b"")
    if item.pixels is not None:
        once = single(item.pixels, patch) if patch and item.modality == "image" else item.pixels
        pixels = _tensor(once, message.pixels, dtype)
    if item.crops is not None:
        crops = _tensor(item.crops, message.crops, dtype)
    encoded = bytes_of(item.encoded) if item.encoded is not None else memoryview(b"")
    return WireItem(message, ItemTensors(pixels, crops, encoded))


def _tensor(tensor: Pixels, message: pb.Tensor, dtype: str) -> memoryview:
    """Set type and shape in `message`; returns the bytes."""
    smaller = rounded(tensor, dtype)
    message.data_type = DATA_TYPES[type_name(tensor) if smaller is None else dtype]
    message.shape.extend(tensor.shape)
    tensor = tensor if smaller is None else smaller
    array = tensor if isinstance(tensor, np.ndarray) else _from_torch(tensor)
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
        array = array.astype(array.dtype.newbyteorder("<"))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _from_torch(tensor: TorchTensor) -> Array:
    """The tensor as array, sharing memory if on the host; bfloat16, which numpy lacks, as uint16."""
    host = tensor.detach().cpu().contiguous()
    if type_name(tensor) == "bfloat16":
        host = host.view(sys.modules["torch"].uint16)
    array: Array = host.numpy()
    return array


def single(pixels: Tensor, patch: Patch) -> Tensor:
    """Patches `(patches, C*p*p)` with one of the equal frames of `pixels`, `(patches, C*T*p*p)`.

    Returns `pixels` if its frames differ in any bit, or if it has another shape.
    """
    rows = pixels.shape[0]
    if patch.frames == 1 or tuple(pixels.shape) != (rows, prod(patch)):
        return pixels
    bits = _bits(pixels).reshape(rows, *patch)
    if not all(_equal(bits[:few], patch.frames) for few in (1, rows)):  # most that differ do so in the first patch
        return pixels
    return pixels.reshape(rows, *patch)[:, :, 0].reshape(rows, patch.channels * patch.area)


def _equal(bits: Tensor, frames: int) -> bool:
    return all(bool((bits[:, :, 0] == bits[:, :, frame]).all()) for frame in range(1, frames))


def _bits(pixels: Tensor) -> Tensor:
    """As integers: zeros of two signs differ, and NaN equals itself."""
    if isinstance(pixels, np.ndarray):
        return pixels.view(f"i{pixels.dtype.itemsize}") if pixels.dtype.kind == "f" else pixels
    torch = sys.modules["torch"]  # it is a tensor
    return pixels.detach().view({2: torch.int16, 4: torch.int32}.get(pixels.element_size(), pixels.dtype))


def rounded(tensor: Tensor, dtype: str) -> Tensor | None:
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
