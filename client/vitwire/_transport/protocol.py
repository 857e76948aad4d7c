"""The protocol without I/O, shared by both clients: items to messages, response frames to embeddings."""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from vitwire._delivery.answers import Expected
from vitwire._delivery.nixl import Leases, Leasing
from vitwire._inputs.tensors import invalid
from vitwire._transport.balancing import Share
from vitwire._transport.uploads import Patch, WireItem, to_wire
from vitwire.embeddings import OUTPUT_TYPES, DType
from vitwire.items import Item, Priority
from vitwire.model import Model
from vitwire.options import ProcessorOptions
from vitwire.v1 import encoder_pb2 as pb
from vitwire.wire import Frame, Request

Upload = Frame[pb.EncodeStreamRequest]

ONE_MESSAGE_BYTES = 4 << 20
"""Larger requests are sent as a stream; gRPC's default limit of a message."""
CHUNK_BYTES = 1 << 20
_WINDOW_BYTES = 64 << 10
"""Bytes of a message that HTTP/2 delivers before the server asks for it."""
_STORED_BYTES = 512 << 10
"""A larger item to store is streamed, and accepted before all of it has arrived; a message takes less of both sides."""
_ROW_VALUE_BYTES = 2
"""Bytes of a value in float16 and bfloat16, the usual types of a server."""
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
    store_only: bool = False
    """Have the rows cached, and return none."""
    in_groups: bool = False
    """Have rows of clips sent as they are computed, and give out rows as they arrive."""

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
    model: Model
    share: Share
    """With the hint of the replica that may have these items cached."""
    leases: Leases | None = None
    """Memory for the rows of each item, in this attempt."""

    def without(self, answered: Set[int]) -> "Part":
        """The part without the items at these positions of the caller's request."""
        rows = [row for row in zip(self.indices, self.items, self.expected, strict=True) if row[0] not in answered]
        indices, items, expected = zip(*rows, strict=True) if rows else ((), (), ())
        return replace(self, indices=indices, items=items, expected=expected, leases=None)

    def yielding(self) -> "Part":
        """For a server that is full: as a stream, unless its message is received at once."""
        options = self.options if self._size <= _WINDOW_BYTES else replace(self.options, stream=True)
        return replace(self, options=options)

    @property
    def one_message(self) -> bool:
        """Whether to send the items in one message rather than as a stream."""
        if self.options.stream or self.late:
            return False
        if self.options.store_only and (len(self.items) > 1 or self._size > _STORED_BYTES):
            return False
        most_items = self.model.limits.items_per_request or len(self.items)
        most_bytes = min(ONE_MESSAGE_BYTES, self.model.limits.request_bytes or ONE_MESSAGE_BYTES)
        return len(self.items) <= most_items and self._size <= most_bytes

    @property
    def late(self) -> tuple[int, ...]:
        """Numbers of items with content that are leased memory once the server has announced their rows."""
        if not self.options.leasing:
            return ()
        each = zip(self.items, self.expected, strict=True)
        return tuple(number for number, (item, expected) in enumerate(each) if item.size and not expected.rows)

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
        """The messages of an EncodeStream; chunks are views of the items' memory.

        Between them the regions of late items are sent, and after them, until none is undecided.
        """
        leases, most = self.leases, self.model.limits.items_per_request or 1
        options = pb.EncodeStreamOptions(
            output_type=self.options.output_type,
            priority=self.options.priority,
            delivery=self.leases.delivery if self.leases else None,
        )
        yield Frame(pb.EncodeStreamRequest(options=options))
        for number, (item, message) in enumerate(zip(self.items, self._messages(), strict=True)):
            is_late = leases is not None and leases.is_late(number)
            yield from _regions(leases, number, wait=most if is_late else None)
            header = pb.EncodeStreamHeader(
                item=number, header=message, encoded_bytes=len(item.tensors.encoded), region_follows=is_late
            )
            yield Frame(pb.EncodeStreamRequest(header=header))
            for tensor in item.tensors:
                for start in range(0, len(tensor), CHUNK_BYTES):
                    chunk = pb.EncodeStreamRequest(chunk=pb.EncodeStreamChunk(item=number))
                    yield Frame(chunk, memoryview(tensor)[start : start + CHUNK_BYTES])
                    yield from _regions(leases, number + 1)
        yield from _regions(leases, len(self.items), wait=1)

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


def _regions(leases: Leases | None, sent: int, *, wait: int | None = None) -> Iterator[Upload]:
    """Messages about memory that was leased late; see `Leases.next_region`."""
    while leases and (region := leases.next_region(sent, wait=wait)):
        yield Frame(pb.EncodeStreamRequest(region=region))


def parts_of(items: Mapping[int, Item], shares: Sequence[Share], options: Options, model: Model) -> list[Part]:
    """The messages of each share, without those items of a share that are not among `items`; no part is empty.

    Raises InvalidItem for options that the server does not list: older ones would ignore them.
    """
    for index, item in items.items():
        given = own.given() if (own := ProcessorOptions.of(item.options)) else {}
        if missing := [name for name in given if name not in model.options]:
            text = f"the server has no option {missing[0]} for {model.model_type}"
            raise invalid(f"items[{index}].options.{missing[0]}", text, index)
    present = [({index: items[index] for index in share.indices if index in items}, share) for share in shares]
    return [_part(own, share, options, model) for own, share in present if own]


def _part(items: Mapping[int, Item], share: Share, options: Options, model: Model) -> Part:
    patch = Patch(model.channels, model.temporal_patch_size, model.patch_size**2)
    wire = tuple(to_wire(item, model.dtype, patch, store_only=options.store_only) for item in items.values())
    for each in wire:
        each.message.in_groups = options.in_groups and each.message.modality == pb.MODALITY_VIDEO
    expected = tuple(Expected.of(item, model) for item in items.values())
    return Part(tuple(items), wire, expected, options, model, share)
