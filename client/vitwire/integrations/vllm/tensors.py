"""Tensors in the file format of `torch.save`, written without torch.

vLLM decodes embeddings with `torch.load(weights_only=True)` or as `.npy`; numpy has no bfloat16, so the latter would
double their size.
"""

import io
import struct
import zipfile
from base64 import b64encode

import numpy as np
import numpy.typing as npt

_STORAGES = {
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
}
"""torch's class for each type; an array of bfloat16 has their bits in any type of 16 bits."""


def torch_base64(array: npt.NDArray[np.generic], dtype: str) -> str:
    """The array as a file of `torch.save`, in base64."""
    return b64encode(torch_file(array, dtype)).decode()


def torch_file(array: npt.NDArray[np.generic], dtype: str) -> bytes:
    """The array as a file of `torch.save`: a ZIP archive of a pickle and the bytes of one storage."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("tensor/data.pkl", _pickled(array.shape, _STORAGES[dtype]))
        archive.writestr("tensor/byteorder", "little")
        archive.writestr("tensor/data/0", np.ascontiguousarray(array).data.cast("B"))
        archive.writestr("tensor/version", "3\n")
    return file.getvalue()


def _pickled(shape: tuple[int, ...], storage: str) -> bytes:
    """A call of torch's `_rebuild_tensor_v2(storage, offset, shape, strides, requires_grad, hooks)`, protocol 2."""
    count = int(np.prod(shape))
    strides = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    persistent = _tuple(_text("storage"), _global("torch", storage), _text("0"), _text("cpu"), _int(count))
    hooks = _global("collections", "OrderedDict") + b")R"
    arguments = _tuple(
        persistent + b"Q", _int(0), _tuple(*map(_int, shape)), _tuple(*map(_int, strides)), b"\x89", hooks
    )
    return b"\x80\x02" + _global("torch._utils", "_rebuild_tensor_v2") + arguments + b"R."


def _tuple(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def _int(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()
