"""Response frames to embeddings, shared by both clients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitwire._delivery.answers import (
    Accepted,
    Answer,
    Expected,
    Outcome,
    Response,
    accepted_of,
    grid_of,
    is_finite,
    report_problem,
    stored_of,
)
from vitwire._delivery.memory import empty
from vitwire._delivery.nixl import Leases
from vitwire.embeddings import DTYPES, STORAGE, DType, Embedding, Report, RowGroup
from vitwire.errors import EncodeFailed, from_status
from vitwire.v1 import encoder_pb2 as pb
from vitwire.wire import Buffer, Malformed

Message = pb.EncodeResponse | pb.EncodeStreamResponse

MAX_EMBEDDING_BYTES = 2 << 30
_MAX_DIMENSIONS = 4


class Assembler:
    """Assembles embeddings from the response frames of one RPC; buffers are bounded and filled in order.

    `indices` are the positions of the RPC's items in the caller's request, `levels` the model's deepstack levels,
    `expected` the expected embeddings, `grouped` how many rows of items in groups were given out. Raises EncodeFailed
    for an invalid response; values that are not finite fail only their item.
    """

    def __init__(
        self,
        indices: Sequence[int],
        levels: int,
        expected: Sequence[Expected] = (),
        leases: Leases | None = None,
        request_id: str = "",
        *,
        store_only: bool = False,
        grouped: dict[int, int] | None = None,
    ) -> None:
        self._indices = indices
        self._levels = levels
        self._leases = leases
        self._request_id = request_id
        self._store_only = store_only
        self._grouped = {} if grouped is None else grouped
        self._expected = expected or [Expected()] * len(indices)
        self._open: dict[int, _Rows | None] = dict.fromkeys(range(len(indices)))

    def feed(self, response: Response) -> Answer | None:
        """The result of the item that this frame completes or accepts, or a group of its rows, if any."""
        if isinstance(response, Malformed):
            raise EncodeFailed(f"the response cannot be parsed: {response.reason}")
        message = response.message
        if message.item not in self._open:
            raise EncodeFailed(f"the server answered for item {message.item}, which is unknown or already answered")
        index = self._indices[message.item]
        try:
            answer = self._answer(index, message, response.data)
        except ValueError as error:
            raise EncodeFailed(f"items[{index}]: {error}", item=index) from None
        if answer is None:
            return None
        if not isinstance(answer, Accepted | RowGroup):
            del self._open[message.item]
        return index, answer

    def finish(self) -> None:
        """End of the RPC. Raises EncodeFailed if items are not answered."""
        if self._open:
            missing = sorted(self._indices[number] for number in self._open)
            raise EncodeFailed(f"the response ended without the items {missing}", item=missing[0])

    def _answer(self, index: int, message: Message, data: Buffer) -> Outcome | None:
        """Raises ValueError for an invalid response."""
        leases, expected = self._leases, self._expected[message.item]
        match message.WhichOneof("result"):
            case "error":
                if leases:
                    leases.refused(message.item)
                return from_status(message.error, index, self._indices)
            case "accepted" if leases and leases.is_late(message.item):
                leases.announced(message.item, accepted_of(message.accepted, expected).tokens)
                return None
            case "accepted" if self._store_only:
                return accepted_of(message.accepted, expected)
            case "stored" if self._store_only:
                report = Report.from_message(message.report, self._request_id)
                return stored_of(message.stored, report, expected)
            case "placement" | "chunk" if self._store_only:
                raise ValueError("the server returned an embedding instead of storing it: it is older than this client")
            case "placement":
                return self._placement(index, message, expected)
            case "chunk":
                return self._chunk(index, message, expected, data)
        raise ValueError("the server sent neither an embedding nor an error")

    def _report(self, message: Message, rows: int) -> Report:
        report = Report.from_message(message.report, self._request_id)
        if problem := report_problem(report, rows):
            raise ValueError(f"the server sent {problem}")
        return report

    def _placement(self, index: int, message: Message, expected: Expected) -> Embedding | EncodeFailed:
        """The embedding that the server wrote into the lease of its item."""
        lease, placement = self._leases.delivered(message.item) if self._leases else None, message.placement
        if lease is None:
            raise ValueError("the server delivered the embedding of an item without a region")
        shape, dtype, size = _shape_of(placement, self._levels, expected)
        if placement.offset != lease.region.offset or placement.bytes != size or size > lease.region.nbytes:
            raise ValueError(f"the server delivered {placement.bytes} bytes at {placement.offset}, not in the region")
        report = self._report(message, shape[0])
        rows = lease.rows(shape, STORAGE[dtype])
        if isinstance(rows, np.ndarray) and not is_finite(rows, dtype):  # on a device, a check would wait for it
            return EncodeFailed(f"items[{index}]: the server wrote NaN or infinite values", item=index)
        return Embedding(rows, dtype, self._levels, report, grid_of(expected, report))

    def _chunk(self, index: int, message: Message, expected: Expected, data: Buffer) -> Embedding | EncodeFailed | None:
        rows, chunk = self._open[message.item], message.chunk
        if rows is None:
            rows = self._open[message.item] = _Rows.announced(chunk, self._levels, expected)
        rows.add(chunk, data)
        if not chunk.last:
            first = self._grouped.get(index, rows.filled)
            if first >= rows.filled or not rows.finite:
                return None
            self._grouped[index] = rows.filled
            return RowGroup(rows.array[first : rows.filled], rows.dtype, self._levels, Report(), expected.grid, first)
        report = self._report(message, len(rows.array))
        if self._leases:
            self._leases.returned(message.item, report.delivery_fallback)
        if not rows.finite:
            return EncodeFailed(f"items[{index}]: the server sent NaN or infinite values", item=index)
        return Embedding(rows.array, rows.dtype, self._levels, report, grid_of(expected, report))


@dataclass(slots=True)
class _Rows:
    """The rows of one embedding so far. Raises ValueError for invalid chunks."""

    array: npt.NDArray[Any]
    dtype: DType
    filled: int = 0
    finite: bool = True

    @classmethod
    def announced(cls, chunk: pb.EmbeddingChunk, levels: int, expected: Expected) -> "_Rows":
        shape, dtype, _ = _shape_of(chunk, levels, expected)
        return cls(empty(shape, STORAGE[dtype]), dtype)

    def add(self, chunk: pb.EmbeddingChunk, data: Buffer) -> None:
        if tuple(chunk.shape) != self.array.shape or DTYPES.get(chunk.data_type) != self.dtype:
            raise ValueError("the server changed shape or type between chunks")
        if chunk.row != self.filled:
            raise ValueError(f"the server sent row {chunk.row}, expected row {self.filled}")
        row_bytes = self.array.itemsize * math.prod(self.array.shape[1:])
        count, rest = divmod(len(data), row_bytes)
        if rest or count > len(self.array) - self.filled:
            raise ValueError(f"the server sent {len(data)} bytes for rows of {row_bytes} bytes")
        rows = np.frombuffer(data, self.array.dtype).reshape(count, *self.array.shape[1:])
        self.array[self.filled : self.filled + count] = rows
        self.finite = self.finite and is_finite(self.array[self.filled : self.filled + count], self.dtype)
        self.filled += count
        if chunk.last and self.filled != len(self.array):
            raise ValueError(f"the server sent {self.filled} of {len(self.array)} rows")


def _shape_of(
    message: pb.EmbeddingChunk | pb.EmbeddingPlacement, levels: int, expected: Expected
) -> tuple[tuple[int, ...], DType, int]:
    """Shape, type and bytes of an embedding. Raises ValueError for those that cannot be, or are not as expected."""
    if message.data_type not in DTYPES:
        raise ValueError(f"the server sent an embedding of unknown type {message.data_type}")
    dtype = DTYPES[message.data_type]
    shape = tuple(message.shape)
    if not 2 <= len(shape) <= _MAX_DIMENSIONS or min(shape[1:]) == 0 or shape[-1] % (1 + levels):
        raise ValueError(f"the server announced an embedding of shape {shape} with {levels} levels")
    size = math.prod(shape) * np.dtype(STORAGE[dtype]).itemsize
    if size > MAX_EMBEDDING_BYTES or shape[0] > MAX_EMBEDDING_BYTES:
        raise ValueError(f"the server announced an embedding of {size} bytes")
    if problem := expected.shape_problem(shape):
        raise ValueError(f"the server announced {problem}")
    return shape, dtype, size
