"""The first frame of an embedding message: a pickled `EmbeddingData` of SGLang 0.5.23, written without SGLang or torch.

SGLang's receivers unpickle it with an allow-list of classes; the second frame has the rows. Nothing is unpickled here.
"""

import pickle
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from vitwire_gateway.sglang.parts import Part

_PROTOCOL = 2
_CLASS = ("sglang.srt.disaggregation.encoder.receiver", "EmbeddingData")
_MODALITY = ("sglang.srt.multimodal.modality", "Modality")
_IMAGE = 1
"""Value of `Modality.IMAGE`."""


def embedding_header(part: Part, grids: Sequence[tuple[int, int, int]], shape: Sequence[int], dtype: str) -> bytes:
    """The header of rows of `shape` and `dtype` (float32, float16 or bfloat16), of images with these grids."""
    plain = _plain(part) | {"grid_dim": [list(grid) for grid in grids], "shape": list(shape), "error_msg": None}
    return _pickled(plain | {"error_code": None}, _global("torch", dtype))


def error_header(part: Part, message: str, status: HTTPStatus) -> bytes:
    """The header, and only frame, of a message that fails the request in SGLang."""
    plain = _plain(part) | {"grid_dim": None, "shape": None, "error_msg": message, "error_code": int(status)}
    return _pickled(plain, pickle.NONE)


def _plain(part: Part) -> dict[str, Any]:
    identity = {"req_id": part.req_id, "num_parts": part.num_parts, "part_idx": part.part_idx}
    return identity | {"embedding": None, "send_time": None, "_mr_ptr": None}


def _pickled(plain: Mapping[str, Any], dtype: bytes) -> bytes:
    """An object of `_CLASS` with the attributes `plain`, `dtype` and `modality`."""
    modality = _global(*_MODALITY) + _fragment(_IMAGE) + pickle.TUPLE1 + pickle.REDUCE
    attributes = {key: _fragment(value) for key, value in plain.items()} | {"dtype": dtype, "modality": modality}
    state = b"".join(_fragment(key) + value for key, value in attributes.items())
    return (
        pickle.PROTO + bytes([_PROTOCOL])
        + _global(*_CLASS) + pickle.EMPTY_TUPLE + pickle.NEWOBJ
        + pickle.EMPTY_DICT + pickle.MARK + state + pickle.SETITEMS
        + pickle.BUILD + pickle.STOP
    )  # fmt: skip


def _global(module: str, name: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{name}\n".encode()


def _fragment(value: object) -> bytes:
    """The opcodes that push a plain value: its pickle without the protocol in front and STOP at the end."""
    return pickle.dumps(value, _PROTOCOL)[2:-1]
