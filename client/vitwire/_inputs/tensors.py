"""Tensors of a whole batch, brought to host memory in the types that items may have."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from vitwire.errors import InvalidItem, Violation
from vitwire.v1 import encoder_pb2 as pb

Tensor: TypeAlias = Any
"""A numpy array or a torch tensor, which have slicing and `reshape` in common."""
Batch: TypeAlias = "Tensor | list[Tensor]"
"""One tensor, or a list of tensors of one rank, as processors return for content of different sizes."""


@runtime_checkable
class TorchTensor(Protocol):
    """The parts of torch.Tensor in use; torch itself is not imported."""

    @property
    def dtype(self) -> object: ...

    @property
    def shape(self) -> Sequence[int]: ...

    def detach(self) -> Tensor: ...


Array = npt.NDArray[Any]
Pixels = Array | TorchTensor

DATA_TYPES: dict[str, "pb.DataType.ValueType"] = {
    "float32": pb.DATA_TYPE_FLOAT32,
    "float16": pb.DATA_TYPE_FLOAT16,
    "bfloat16": pb.DATA_TYPE_BFLOAT16,
    "uint8": pb.DATA_TYPE_UINT8,
}


def invalid(field: str, description: str, item: int | None = None) -> InvalidItem:
    return InvalidItem(f"{field}: {description}", item=item, violations=[Violation(field, description)])


def type_name(tensor: Pixels) -> str:
    """Name of the dtype, such as float32."""
    return tensor.dtype.name if isinstance(tensor, np.ndarray) else str(tensor.dtype).removeprefix("torch.")


def on_host(value: object, field: str) -> Batch:
    """A tensor, or a possibly nested list of tensors or numbers, in host memory and an accepted type.

    float64 becomes float32. Tensors on a device are copied in one transfer. Raises InvalidItem, which names the field.
    """
    if isinstance(value, np.ndarray | TorchTensor) and str(value.dtype) != "object":
        if not len(value.shape):
            raise invalid(field, "expected a batch of items, got a single number")
        return _accepted(_copied(value, field), field)
    tensors = list(_flat(value))
    if not tensors:
        return np.empty((0, 0), np.float32)
    if not all(isinstance(each, np.ndarray | TorchTensor) for each in tensors):
        return _accepted(_from_numbers(value, field), field)
    found = [_accepted(each, f"{field}[{at}]") for at, each in enumerate(_together(tensors, field))]
    if len({len(each.shape) for each in found}) > 1:
        raise invalid(
            field, f"expected tensors of one rank, got the shapes {[tuple(each.shape) for each in found[:8]]}"
        )
    return found


def rank(batch: Batch) -> int:
    """Number of axes; that of a list includes the axis along the list."""
    return 1 + len(batch[0].shape) if isinstance(batch, list) else len(batch.shape)


def outline(batch: Batch) -> str:
    """Its shape in words."""
    if isinstance(batch, list):
        return f"a list of {len(batch)} tensors such as {tuple(batch[0].shape)}"
    return f"the shape {tuple(batch.shape)}"


def check_rank(batch: Batch, field: str, axes: int, expected: str) -> None:
    """Raises InvalidItem for a batch of another number of axes, unless it is empty."""
    if len(batch) and rank(batch) != axes:
        raise invalid(field, f"expected {expected}, got {outline(batch)}")


def rows(batch: Batch, start: int, end: int) -> Tensor:
    """The part of the first axis; a view, unless the batch is a list."""
    if not isinstance(batch, list):
        return batch[start:end]
    parts = batch[start:end]
    return np.stack(parts) if isinstance(parts[0], np.ndarray) else sys.modules["torch"].stack(parts)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors, one after the other along the first axis."""
    if len(tensors) == 1:
        return tensors[0]
    return np.concatenate(tensors) if isinstance(tensors[0], np.ndarray) else sys.modules["torch"].cat(tensors)


def integers(value: object, field: str) -> npt.NDArray[np.int64]:
    """A tensor or nested lists of whole numbers, as an array."""
    host: Any = value.detach().cpu() if isinstance(value, TorchTensor) else value
    try:
        array = np.asarray(host)
    except (TypeError, ValueError):
        array = np.empty(0)
    if array.dtype.kind not in "iu":
        raise invalid(field, f"expected whole numbers, got {type(value).__name__}")
    return array.astype(np.int64)


def _flat(value: object) -> Iterator[object]:
    """The tensors or numbers of nested lists, in order."""
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def _from_numbers(value: object, field: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        raise invalid(field, "expected a tensor, or lists of equal lengths; the lists are ragged") from None
    if array.dtype.kind not in "fiu" or array.ndim == 0:
        raise invalid(field, f"expected a numpy array or a torch tensor, got {type(value).__name__}")
    return array.astype(np.float32)


def _together(tensors: Sequence[Any], field: str) -> Sequence[Tensor]:
    """The tensors on the host; those on one device and of one type are copied in one transfer."""
    places = {(str(getattr(each, "device", "cpu")), str(each.dtype)) for each in tensors}
    torch: Any = sys.modules.get("torch")
    if len(places) > 1 or next(iter(places))[0] == "cpu" or len(tensors) == 1:
        return [_copied(each, field) for each in tensors]
    joined = _copied(torch.cat([each.detach().reshape(-1) for each in tensors]), field)
    flat = joined.split([each.numel() for each in tensors])
    return [own.reshape(each.shape) for own, each in zip(flat, tensors, strict=True)]


def _copied(tensor: Tensor, field: str) -> Tensor:
    """The tensor on the host, without a gradient; float64 is converted on its device."""
    if isinstance(tensor, np.ndarray):
        return tensor
    try:
        own = tensor.detach()
        return (own if type_name(own) in DATA_TYPES or not own.is_floating_point() else own.float()).cpu()
    except (RuntimeError, NotImplementedError) as error:  # of meta tensors, for example
        raise invalid(field, f"cannot be copied to the host: {str(error).partition(chr(10))[0]}") from None


def _accepted(tensor: Pixels, field: str) -> Tensor:
    """The tensor in an accepted type. Raises InvalidItem."""
    if isinstance(tensor, np.ndarray) and tensor.dtype.kind == "f" and type_name(tensor) not in DATA_TYPES:
        tensor = tensor.astype(np.float32)
    if type_name(tensor) not in DATA_TYPES:
        raise invalid(field, f"expected a floating type or uint8, got {tensor.dtype}")
    if "sparse" in str(getattr(tensor, "layout", "")):
        raise invalid(field, "expected a dense tensor, got a sparse one")
    return tensor
