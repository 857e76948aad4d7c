"""The protocol without I/O, shared by both clients: items to messages, response frames to embeddings."""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vitwire._embedding import DTYPES, OUTPUT_TYPES, STORAGE, DType, Embedding, Report
from vitwire._errors import EncodeFailed, NotCached, VitwireError, from_status
from vitwire._expected import Expected, is_finite, report_problem
from vitwire._items import Item, WireItem, to_wire
from vitwire._leases import Lease
from vitwire._memory import empty
from vitwire._model import Limits, Model
from vitwire._nixl import Leases, Leasing
from vitwire.v1 import encoder_pb2 as pb
from vitwire.wire import Buffer, Frame, Malformed, Request

Priority = Literal["interactive", "batch"]
Result = tuple[int, Embedding | VitwireError]
Response = Frame[pb.EncodeResponse] | Frame[pb.EncodeStreamResponse] | Malformed
Upload = Frame[pb.EncodeStreamRequest]

ONE_MESSAGE_BYTES = 4 << 20
"""Larger requests are sent as a stream; gRPC's default limit of a message."""
CHUNK_BYTES = 1 << 20
MAX_EMBEDDING_BYTES = 2 << 30
_WINDOW_BYTES = 64 << 10
"""What HTTP/2 delivers of a message before the server asks for it."""
_ROW_VALUE_BYTES = 2
"""Of float16 and bfloat16, the usual types of a server."""
_MAX_DIMENSIONS = 4
_DELIVERY_BYTES = 8 << 10
"""Upper bound of the metadata and regions that a request with leases has."""
_FRAMING_BYTES = 32
"""Upper bound of the tags and lengths around one item and its two tensors."""
_PRIORITIES: dict[Priority, "pb.Priority.ValueType"] = {
    "interactive": pb.PRIORITY_INTERACTIVE,
    "batch": pb.PRIORITY_BATCH,
}


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a whole request."""

    output_type: "pb.DataType.ValueType"
    priority: "pb.Priority.ValueType"
    stream: bool = False
    """Always use a stream: an invalid item fails a whole message, but not a stream."""
    leasing: Leasing | None = None
    """Leases memory for the rows; None if they come in the response."""

    @property
    def patient(self) -> bool:
        """Whether the request may wait a long time behind others."""
        return self.priority == pb.PRIORITY_BATCH

    @classmethod
    def of(cls, output_type: DType | None, priority: Priority, *, stream: bool = False) -> "Options":
        """Raises ValueError for an unknown name."""
        if priority not in _PRIORITIES:
            raise ValueError(f"priority must be one of {', '.join(_PRIORITIES)}, got {priority!r}")
        if output_type is None:
            return cls(pb.DATA_TYPE_UNSPECIFIED, _PRIORITIES[priority], stream)
        if output_type not in OUTPUT_TYPES:
            raise ValueError(f"output_type must be one of {', '.join(OUTPUT_TYPES)}, got {output_type!r}")
        return cls(OUTPUT_TYPES[output_type], _PRIORITIES[priority], stream)


@dataclass(frozen=True, slots=True)
class Part:
    """The items of one RPC, and their positions in the caller's request."""

    indices: tuple[int, ...]
    items: tuple[WireItem, ...]
    expected: tuple[Expected, ...]
    options: Options
    limits: Limits
    leases: Leases | None = None
    """Memory for the rows of each item, in this attempt."""

    def without(self, answered: Set[int]) -> "Part":
        """The part without the items at these positions of the caller's request."""
        rows = [row for row in zip(self.indices, self.items, self.expected, strict=True) if row[0] not in answered]
        indices, items, expected = zip(*rows, strict=True) if rows else ((), (), ())
        return Part(indices, items, expected, self.options, self.limits)

    def yielding(self) -> "Part":
        """For a server that is full: as a stream, unless its message is received at once."""
        options = self.options if self._size <= _WINDOW_BYTES else replace(self.options, stream=True)
        return replace(self, options=options)

    @property
    def one_message(self) -> bool:
        """Whether to send the items in one message rather than as a stream."""
        if self.options.stream:
            return False
        most_items = self.limits.items_per_request or len(self.items)
        most_bytes = min(ONE_MESSAGE_BYTES, self.limits.request_bytes or ONE_MESSAGE_BYTES)
        return len(self.items) <= most_items and self._size <= most_bytes

    @property
    def transfer_bytes(self) -> int:
        """About the bytes of the items and of their rows, as far as these are known."""
        rows = sum(each.rows * each.width for each in self.expected) * _ROW_VALUE_BYTES
        return rows + sum(item.size for item in self.items)

    @property
    def _size(self) -> int:
        leasing = _DELIVERY_BYTES + len(self.items) * _FRAMING_BYTES if self.options.leasing else 0
        return leasing + sum(item.size + item.message.ByteSize() + _FRAMING_BYTES for item in self.items)

    def request(self) -> Request:
        message = pb.EncodeRequest(
            items=self._messages(),
            output_type=self.options.output_type,
            priority=self.options.priority,
            delivery=self.leases.delivery if self.leases else None,
        )
        return Request(message, [item.tensors for item in self.items])

    def uploads(self) -> Iterator[Upload]:
        """The messages of an EncodeStream; chunks are views of the items' memory."""
        options = pb.EncodeStreamOptions(
            output_type=self.options.output_type,
            priority=self.options.priority,
            delivery=self.leases.delivery if self.leases else None,
        )
        yield Frame(pb.EncodeStreamRequest(options=options))
        for number, (item, message) in enumerate(zip(self.items, self._messages(), strict=True)):
            header = pb.EncodeStreamHeader(item=number, header=message)
            yield Frame(pb.EncodeStreamRequest(header=header))
            for tensor in item.tensors:
                for start in range(0, len(tensor), CHUNK_BYTES):
                    chunk = pb.EncodeStreamRequest(chunk=pb.EncodeStreamChunk(item=number))
                    yield Frame(chunk, memoryview(tensor)[start : start + CHUNK_BYTES])

    def _messages(self) -> Iterator[pb.Item]:
        """The items, with the regions that are leased for their rows."""
        leases = self.leases.leases if self.leases else (None,) * len(self.items)
        for item, lease in zip(self.items, leases, strict=True):
            if lease is None:
                yield item.message
                continue
            message = pb.Item(region=pb.Region(offset=lease.region.offset, bytes=lease.region.nbytes))
            message.MergeFrom(item.message)
            yield message


def split(items: Mapping[int, Item], options: Options, count: int, model: Model) -> list[Part]:
    """At most `count` parts of about the same number of patches, none empty; items by position.

    Longest processing time first (Graham 1969): items by descending size, each to the lightest part.
    """
    wire = {index: to_wire(item) for index, item in items.items()}
    shares: list[list[int]] = [[] for _ in range(min(count, len(wire)))]
    loads = [0] * len(shares)
    patches = {index: math.prod(item.grid) for index, item in items.items()}
    for index in sorted(patches, key=lambda index: -patches[index]):
        lightest = loads.index(min(loads))
        shares[lightest].append(index)
        loads[lightest] += patches[index]
    expected = {index: Expected.of(item, model) for index, item in items.items()}
    return [
        Part(tuple(own), tuple(wire[i] for i in own), tuple(expected[i] for i in own), options, model.limits)
        for own in map(sorted, shares)
    ]


def needs_upload(result: Embedding | VitwireError, item: Item) -> bool:
    """Whether an item that was looked up without its pixels must be sent with them."""
    return isinstance(result, NotCached) and item.pixels is not None


def embeddings(results: Mapping[int, Embedding | VitwireError]) -> list[Embedding]:
    """The results in order. Raises the error of the first item that has one."""
    ordered: list[Embedding] = []
    for _, result in sorted(results.items()):
        if isinstance(result, VitwireError):
            raise result
        ordered.append(result)
    return ordered


class Assembler:
    """Assembles embeddings from the response frames of one RPC; buffers are bounded and filled in order.

    `indices` are the positions of the RPC's items in the caller's request, `levels` the model's deepstack levels,
    `expected` the expected embeddings. Raises EncodeFailed for an invalid response; values that are not finite fail
    only their item.
    """

    def __init__(
        self, indices: Sequence[int], levels: int, expected: Sequence[Expected] = (), leases: Leases | None = None
    ) -> None:
        self._indices = indices
        self._levels = levels
        self._leases = leases
        self._expected = expected or [Expected()] * len(indices)
        self._open: dict[int, _Rows | None] = dict.fromkeys(range(len(indices)))

    def feed(self, response: Response) -> Result | None:
        """The result of the item that this frame completes, if any."""
        if isinstance(response, Malformed):
            raise EncodeFailed(f"the response cannot be parsed: {response.reason}")
        message = response.message
        if message.item not in self._open:
            raise EncodeFailed(f"the server answered for item {message.item}, which is unknown or already answered")
        index = self._indices[message.item]
        match message.WhichOneof("result"):
            case "error":
                del self._open[message.item]
                if lease := self._lease(message.item):
                    lease.release()
                return index, from_status(message.error, index, self._indices)
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

    def _lease(self, number: int) -> Lease | None:
        return self._leases.leases[number] if self._leases else None

    def _placement(self, index: int, message: pb.EncodeResponse | pb.EncodeStreamResponse) -> Result:
        """The embedding that the server wrote into the lease of its item."""
        lease = self._leases.delivered(message.item) if self._leases else None
        placement, expected = message.placement, self._expected[message.item]
        report = Report.from_message(message.report)
        try:
            if lease is None:
                raise ValueError("the server delivered rows of an item without a region")
            shape, dtype, size = _announced(placement, self._levels, expected)
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
        return index, Embedding(rows, dtype, self._levels, report, expected.grid)

    def _chunk(self, index: int, message: pb.EncodeResponse | pb.EncodeStreamResponse, data: Buffer) -> Result | None:
        rows, expected = self._open[message.item], self._expected[message.item]
        chunk = message.chunk
        try:
            if rows is None:
                rows = self._open[message.item] = _Rows.announced(chunk, self._levels, expected)
            rows.add(chunk, data)
            if not chunk.last:
                return None
            report = Report.from_message(message.report)
            if problem := report_problem(report, len(rows.array)):
                raise ValueError(f"the server sent {problem}")
        except ValueError as error:
            raise EncodeFailed(f"items[{index}]: {error}", item=index) from None
        del self._open[message.item]
        if self._leases:
            self._leases.returned(message.item, report.delivery_fallback)
        if not rows.finite:
            return index, EncodeFailed(f"items[{index}]: the server sent rows with NaN or infinite values", item=index)
        return index, Embedding(rows.array, rows.dtype, self._levels, report, expected.grid)


@dataclass(slots=True)
class _Rows:
    """The rows of one embedding so far. Raises ValueError for invalid chunks."""

    array: npt.NDArray[Any]
    dtype: DType
    filled: int = 0
    finite: bool = True

    @classmethod
    def announced(cls, chunk: pb.EmbeddingChunk, levels: int, expected: Expected) -> "_Rows":
        shape, dtype, _ = _announced(chunk, levels, expected)
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


def _announced(
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
