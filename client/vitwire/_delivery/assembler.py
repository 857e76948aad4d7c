"""Response frames to embeddings, shared by both clients."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitwire._delivery.answers import (
    Answer,
    Expected,
    Response,
    accepted_of,
    grid_of,
    is_finite,
    report_problem,
    stored_of,
)
from vitwire._delivery.memory import empty
from vitwire._delivery.nixl import Leases
from vitwire.embeddings import DTYPES, STORAGE, DType, Embedding, Report
from vitwire.errors import EncodeFailed, from_status
from vitwire.v1 import encoder_pb2 as pb
from vitwire.wire import Buffer, Malformed

MAX_EMBEDDING_BYTES = 2 << 30
_MAX_DIMENSIONS = 4


class Assembler:
    """Assembles embeddings from the response frames of one RPC; buffers are bounded and filled in order.

    `indices` are the positions of the RPC's items in the caller's request, `levels` the model's deepstack levels,
    `expected` the expected embeddings. Raises EncodeFailed for an invalid response; values that are not finite fail
    only their item.
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
    ) -> None:
        self._indices = indices
        self._levels = levels
        self._leases = leases
        self._request_id = request_id
        self._store_only = store_only
        self._expected = expected or [Expected()] * len(indices)
        self._open: dict[int, _Rows | None] = dict.fromkeys(range(len(indices)))

    def feed(self, response: Response) -> Answer | None:
        """The result of the item that this frame completes or accepts, if any."""
        if isinstance(response, Malformed):
            raise EncodeFailed(f"the response cannot be parsed: {response.reason}")
        message = response.message
        if message.item not in self._open:
            raise EncodeFailed(f"the server answered for item {message.item}, which is unknown or already answered")
        index = self._indices[message.item]
        match message.WhichOneof("result"):
            case "error":
                del self._open[message.item]
                if self._leases:
                    self._leases.refused(message.item)
                return index, from_status(message.error, index, self._indices)
            case "accepted" if self._leases and self._leases.is_late(message.item):
                self._announced(index, message, self._leases)
                return None
            case "accepted" | "stored" if self._store_only:
                return self._stored(index, message)
            case "placement" | "chunk" if self._store_only:
                raise EncodeFailed(
                    f"items[{index}]: the server returned rows that it was to store: it is older than this client",
                    item=index,
                )
            case "placement":
                return self._placement(index, message)
            case "chunk":
                return self._chunk(index, message, response.data)
            case _:
                raise EncodeFailed(f"items[{index}]: the server sent neither rows nor an error", item=index)

    def finish(self) -> None:
        """End of the RPC. Raises EncodeFailed if items are not answered."""
        if self._open:
            missing = sorted(self._indices[number] for number in self._open)
            raise EncodeFailed(f"the response ended without the items {missing}", item=missing[0])

    def _stored(self, index: int, message: pb.EncodeResponse | pb.EncodeStreamResponse) -> Answer:
        expected = self._expected[message.item]
        try:
            if message.HasField("accepted"):
                return index, accepted_of(message.accepted, expected)
            stored = stored_of(message.stored, Report.from_message(message.report, self._request_id), expected)
        except ValueError as error:
            raise EncodeFailed(f"items[{index}]: {error}", item=index) from None
        del self._open[message.item]
        return index, stored

    def _announced(self, index: int, message: pb.EncodeResponse | pb.EncodeStreamResponse, leases: Leases) -> None:
        """The rows of an item that memory is leased for now."""
        try:
            accepted = accepted_of(message.accepted, self._expected[message.item])
        except ValueError as error:
            raise EncodeFailed(f"items[{index}]: {error}", item=index) from None
        leases.announced(message.item, accepted.tokens)

    def _placement(self, index: int, message: pb.EncodeResponse | pb.EncodeStreamResponse) -> Answer:
        """The embedding that the server wrote into the lease of its item."""
        lease = self._leases.delivered(message.item) if self._leases else None
        placement, expected = message.placement, self._expected[message.item]
        report = Report.from_message(message.report, self._request_id)
        try:
            if lease is None:
                raise ValueError("the server delivered rows of an item without a region")
            shape, dtype, size = _shape_of(placement, self._levels, expected)
            if placement.offset != lease.region.offset or placement.bytes != size or size > lease.region.nbytes:
                raise ValueError(
                    f"the server delivered {placement.bytes} bytes at {placement.offset}, not in the region"
                )
            if problem := report_problem(report, shape[0]):
                raise ValueError(f"the server sent {problem}")
        except ValueError as error:
            raise EncodeFailed(f"items[{index}]: {error}", item=index) from None
        del self._open[message.item]
        rows = lease.rows(shape, STORAGE[dtype])
        if isinstance(rows, np.ndarray) and not is_finite(rows, dtype):  # on a device, a check would wait for it
            return index, EncodeFailed(f"items[{index}]: the server wrote rows with NaN or infinite values", item=index)
        return index, Embedding(rows, dtype, self._levels, report, grid_of(expected, report))

    def _chunk(self, index: int, message: pb.EncodeResponse | pb.EncodeStreamResponse, data: Buffer) -> Answer | None:
        rows, expected = self._open[message.item], self._expected[message.item]
        chunk = message.chunk
        try:
            if rows is None:
                rows = self._open[message.item] = _Rows.announced(chunk, self._levels, expected)
            rows.add(chunk, data)
            if not chunk.last:
                return None
            report = Report.from_message(message.report, self._request_id)
            if problem := report_problem(report, len(rows.array)):
                raise ValueError(f"the server sent {problem}")
        except ValueError as error:
            raise EncodeFailed(f"items[{index}]: {error}", item=index) from None
        del self._open[message.item]
        if self._leases:
            self._leases.returned(message.item, report.delivery_fallback)
        if not rows.finite:
            return index, EncodeFailed(f"items[{index}]: the server sent rows with NaN or infinite values", item=index)
        return index, Embedding(rows.array, rows.dtype, self._levels, report, grid_of(expected, report))


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
        raise ValueError(f"the server sent rows of the unknown type {message.data_type}")
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
