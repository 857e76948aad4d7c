"""Tensors in the file format of `torch.save`, written without torch.

vLLM decodes embeddings with `torch.load(weights_only=True)` or as `.npy`; numpy has no bfloat16, so the latter would
double their size.
"""

import struct
import zlib
from base64 import b64encode
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from vitwire._delivery.memory import empty
from vitwire.wire import Buffer

_STORAGES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
}
"""torch's class for each type; an array of bfloat16 has their bits in any type of 16 bits."""
_PIECE_BYTES = 3 << 17
"""Encoded at once, which holds the interpreter for less than a millisecond; a multiple of 3."""
_ALIGNMENT = 64 * 3
"""Where the values begin: in a file as torch aligns them, in base64 at a whole number of characters."""
_LOCAL, _CENTRAL, _END = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s4H2IH")
_FIELD = struct.Struct("<2sH")
"""Head of an extra field; torch pads with one named FB."""
_VERSION, _FIRST_DAY = 20, 0x21
"""The version of ZIP, and 1980-01-01 as its date."""


class TorchFile:
    """An array as a file of `torch.save`: a ZIP archive of a pickle and the bytes of one storage.

    Its values stay in the array; iteration yields the file in base64, piece by piece.
    """

    def __init__(self, array: npt.NDArray[np.generic], dtype: str) -> None:
        self._values: Buffer = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        self._head, self._tail = _archive(_pickled(array.shape, _STORAGES[dtype]), self._values)

    def __len__(self) -> int:
        """Characters of the file in base64."""
        return -(-(len(self._head) + len(self._values) + len(self._tail)) // 3) * 4

    def __iter__(self) -> Iterator[bytes]:
        yield b64encode(self._head)
        whole = len(self._values) // 3 * 3
        for start in range(0, whole, _PIECE_BYTES):
            yield b64encode(self._values[start : min(start + _PIECE_BYTES, whole)])
        yield b64encode(bytes(self._values[whole:]) + self._tail)


def torch_base64(array: npt.NDArray[np.generic], dtype: str) -> str:
    """The array as a file of `torch.save`, in base64."""
    file = TorchFile(array, dtype)
    text, end = empty((len(file),), np.uint8), 0
    for piece in file:
        start, end = end, end + len(piece)
        text[start:end] = np.frombuffer(piece, np.uint8)
    return str(text.data, "ascii")


def _archive(pickled: bytes, values: Buffer) -> tuple[bytes, bytes]:
    """The bytes before and after the values in the file; a multiple of `_ALIGNMENT` bytes precedes them."""
    head, directory = bytearray(), bytearray()
    members: dict[str, Buffer] = {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n", "data/0": values}
    for name, content in members.items():
        path, offset, is_last = f"tensor/{name}".encode(), len(head), content is values
        # Version, flags, method, time and date; checksum and sizes.
        common = (_VERSION, 0, 0, 0, _FIRST_DAY, zlib.crc32(content), len(content), len(content), len(path))
        padding = -(offset + _LOCAL.size + len(path) + _FIELD.size) % _ALIGNMENT
        extra = _FIELD.pack(b"FB", padding) + bytes(padding) if is_last else b""
        head += _LOCAL.pack(b"PK\3\4", *common, len(extra)) + path + extra + (b"" if is_last else content)
        directory += _CENTRAL.pack(b"PK\1\2", _VERSION, *common, 0, 0, 0, 0, 0, offset) + path
    count, start = len(members), len(head) + len(values)
    return bytes(head), bytes(directory) + _END.pack(b"PK\5\6", 0, 0, count, count, len(directory), start, 0)


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
