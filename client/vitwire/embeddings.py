"""Results: embeddings and their reports."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from vitwire.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    import torch

Float32 = npt.NDArray[np.float32]
DType = Literal["float32", "float16", "bfloat16"]

OUTPUT_TYPES: dict[DType, "pb.DataType.ValueType"] = {
    "float32": pb.DATA_TYPE_FLOAT32,
    "float16": pb.DATA_TYPE_FLOAT16,
    "bfloat16": pb.DATA_TYPE_BFLOAT16,
}
DTYPES: dict[int, DType] = {number: name for name, number in OUTPUT_TYPES.items()}
_PATHS: dict[int, str] = {number: name.removeprefix("PATH_").lower() for name, number in pb.Path.items()}
STORAGE: dict[DType, npt.DTypeLike] = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
"""numpy dtype of each type; bfloat16, which numpy lacks, is held as uint16."""


@dataclass(frozen=True, slots=True)
class Report:
    """The server's report on one item; `queued` and `encoded` are in seconds."""

    path: str = "unspecified"
    """graph, eager or cache."""
    fallback_reason: str = ""
    """Reason for which no graph was used; empty otherwise."""
    budget_tokens: int = 0
    """Capacity of the replayed graph; 0 when eager."""
    tokens: int = 0
    queued: float = 0.0
    """From admission to the start of the item's batch."""
    encoded: float = 0.0
    """From the start of the item's batch until its embedding is on the host."""
    kept: tuple[int, ...] = ()
    """Indices of the tokens that pruning kept; empty when pruning was off."""
    delivery_fallback: str = ""
    """Reason for which NIXL was not used for this item; empty if it was used or not requested."""
    request_id: str = ""
    """Id of the request in the server's logs and traces."""
    grid: tuple[int, int, int] = (0, 0, 0)
    """Grid that the server chose for a file or picture, or grid of a cached embedding; zeros for other items."""
    frame_seconds: tuple[float, ...] = ()
    """Seconds of each frame that was used of an encoded clip: its index ÷ the clip's mean frame rate. Empty if only its
    content_id was sent."""
    second_per_grid: float = 0.0
    """Seconds of an encoded clip for each of the `t` groups of frames in its grid; 0 if unknown."""

    @classmethod
    def from_message(cls, message: pb.ItemReport, request_id: str = "") -> "Report":
        return cls(
            path=_PATHS.get(message.path, "unspecified"),
            fallback_reason=message.fallback_reason,
            budget_tokens=message.budget_tokens,
            tokens=message.tokens,
            queued=message.queued.seconds + message.queued.nanos / 1e9,
            encoded=message.encoded.seconds + message.encoded.nanos / 1e9,
            kept=tuple(message.kept),
            delivery_fallback=message.delivery_fallback,
            request_id=request_id,
            grid=(message.grid.t, message.grid.h, message.grid.w),
            frame_seconds=tuple(message.frame_seconds),
            second_per_grid=message.second_per_grid,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """Rows of one item, `(tokens, width)`; a row is `[main | level 0 | level 1 | ...]`."""

    _rows: "npt.NDArray[Any] | torch.Tensor"
    """Rows in the server's dtype: an array stored as in `STORAGE`, or a tensor on the client's device."""
    dtype: DType
    """Type of the rows as received: float32, float16 or bfloat16."""
    levels: int
    """Number of deepstack levels."""
    report: Report
    grid: tuple[int, int, int] = (0, 0, 0)
    """Grid of the item in patches; zeros if unknown."""

    @property
    def shape(self) -> tuple[int, ...]:
        """`(tokens, width)`; the width includes deepstack levels."""
        return tuple(self._rows.shape)

    def numpy(self) -> Float32:
        """The rows as float32, `(tokens, width)`; the conversion is exact. A view if they were received as float32."""
        return _float32(self._host(), self.dtype)

    def torch(self, device: "str | torch.device | None" = None) -> "torch.Tensor":
        """The rows in the server's dtype, `(tokens, width)`.

        device: default: where they are, sharing this object's memory: the client's `device` if they were delivered
            there, else the CPU. Rows are copied from the host to a CUDA device through pinned memory, in the order of
            the current stream, without waiting for the work that is enqueued there.
        """
        import torch  # noqa: PLC0415  # not a dependency of the client

        tensor = self._rows if not isinstance(self._rows, np.ndarray) else torch.from_numpy(self._rows)
        if self.dtype == "bfloat16":
            tensor = tensor.view(torch.bfloat16)
        if device is None:
            return tensor
        wanted = torch.device(device)
        if tensor.is_cpu and wanted.type == "cuda":
            return tensor.pin_memory().to(wanted, non_blocking=True)
        return tensor.to(wanted)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """As `numpy()`, for `np.asarray`. Raises ValueError if `copy=False` is impossible."""
        wanted = np.dtype(np.float32 if dtype is None else dtype)
        rows = self._host()
        shares = self.dtype != "bfloat16" and wanted == rows.dtype and rows is self._rows
        if copy is False and not shares:
            raise ValueError(f"an array of {wanted} needs a copy of rows that are {self.dtype}")
        if shares:
            return rows.copy() if copy else rows
        return self.numpy().astype(wanted, copy=False)

    @property
    def main(self) -> Float32:
        """The rows without the deepstack levels, float32, `(tokens, width / (1 + levels))`.

        A view if the rows were received as float32; else only this part is converted.
        `torch().chunk(1 + levels, -1)` gives views in any dtype.
        """
        return self._level(0)

    @property
    def deepstack(self) -> list[Float32]:
        """Each deepstack level, float32, `(tokens, width / (1 + levels))`."""
        return [self._level(1 + level) for level in range(self.levels)]

    def _level(self, index: int) -> Float32:
        width = self._rows.shape[-1] // (1 + self.levels)
        return _float32(self._host()[..., index * width : (index + 1) * width], self.dtype)

    def _host(self) -> npt.NDArray[Any]:
        """The rows as in `STORAGE`, copied to the host if they are on a device."""
        if isinstance(self._rows, np.ndarray):
            return self._rows
        import torch  # noqa: PLC0415  # the rows are its tensor

        rows = self._rows.cpu()
        array: npt.NDArray[Any] = (rows.view(torch.uint16) if self.dtype == "bfloat16" else rows).numpy()
        return array

    def __repr__(self) -> str:
        return f"Embedding(shape={self.shape}, dtype={self.dtype}, path={self.report.path})"


@dataclass(frozen=True, slots=True, eq=False)
class RowGroup(Embedding):
    """Rows of an item, while others are still to come: from `row` on. Its report is empty."""

    row: int = 0


def _float32(rows: npt.NDArray[Any], dtype: DType) -> Float32:
    """A bfloat16 is the upper half of the float32 of the same value."""
    if dtype == "bfloat16":
        widened: Float32 = np.left_shift(rows, 16, dtype=np.uint32).view(np.float32)
        return widened
    return rows.astype(np.float32, copy=False)
