"""Tensor-carrying messages without copies: framing shared by client and server.

protobuf copies a `bytes` field whenever it is set, serialised, parsed and read. Here protobuf handles the message
without its tensor bytes; these are appended when writing, and cut out as views when reading. The result is
byte-identical to protobuf's serialisation, as these fields have the highest numbers of their message and so come
last (https://protobuf.dev/programming-guides/encoding). Input is untrusted: every length is checked, and nothing is
allocated for a claimed length.
"""

from collections.abc import Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from vitwire.v1 import encoder_pb2 as pb

Buffer = bytes | bytearray | memoryview
M = TypeVar("M", bound=Message)

ENCODED = 13
CROPS = 14
DATA = PIXELS = CHUNK = 15
_ITEMS = 1
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_MAX_FIELDS = 1 << 14
"""Maximum fields of a message: each takes microseconds in Python, so a megabyte of tiny ones would take seconds."""
_NOTHING = memoryview(b"")
_ONE_BYTE = [bytes([value]) for value in range(0x80)]
_CHUNK_TAG = bytes([CHUNK << 3 | _LENGTH])
_DATA_TAG = bytes([DATA << 3 | _LENGTH])


class Frame(NamedTuple, Generic[M]):
    """A message and, separately, the bytes of its tensor field."""

    message: M
    data: Buffer = b""


class ItemTensors(NamedTuple):
    """The bytes of one item's tensors, or of its file; empty if it has none."""

    pixels: Buffer = _NOTHING
    crops: Buffer = _NOTHING
    encoded: Buffer = _NOTHING


class Request(NamedTuple):
    """An EncodeRequest without tensor data, and the data of each item."""

    message: pb.EncodeRequest
    tensors: Sequence[ItemTensors]


class Malformed(NamedTuple):
    """Stands for a message that cannot be parsed: gRPC hides errors raised in a deserialiser."""

    reason: str


# -- writing ---------------------------------------------------------------------------------------


def write_request(request: Request) -> bytes:
    """Serialise an EncodeRequest, byte-identical to protobuf with the data filled in."""
    rest = pb.EncodeRequest()
    rest.CopyFrom(request.message)
    rest.ClearField("items")
    parts: list[Buffer] = []
    for item, tensors in zip(request.message.items, request.tensors, strict=True):
        parts += _field(_ITEMS, _item(item, tensors))
    parts.append(rest.SerializeToString())
    return b"".join(parts)


def write_chunk(frame: Frame[M]) -> bytes:
    """Serialise a message with `frame.data` as field 15 of its `chunk` (field 15).

    A message without a chunk is serialised as it is. Messages have no unknown fields.
    """
    message = frame.message
    raw = message.SerializeToString()
    if not message.HasField("chunk"):
        return raw
    size = message.chunk.ByteSize()  # type: ignore[attr-defined]  # every chunked message has it
    start = len(raw) - size
    return join_chunk(raw[: start - len(_varint(size)) - 1], raw[start:], frame.data)


def join_chunk(rest: bytes, chunk: bytes, data: Buffer) -> bytes:
    """A serialised message, from `rest` without its chunk and `chunk` without its data; copies `data` once."""
    if not len(data):
        return b"".join((rest, _CHUNK_TAG, _varint(len(chunk)), chunk))
    length = _varint(len(data))
    size = _varint(len(chunk) + len(_DATA_TAG) + len(length) + len(data))
    return b"".join((rest, _CHUNK_TAG, size, chunk, _DATA_TAG, length, data))


def _item(item: pb.Item, tensors: ItemTensors) -> list[Buffer]:
    head = pb.Item()
    head.CopyFrom(item)
    head.ClearField("pixels")
    head.ClearField("crops")
    head.ClearField("encoded")
    parts: list[Buffer] = [head.SerializeToString()]
    if len(tensors.encoded):
        parts += _field(ENCODED, [tensors.encoded])
    if item.HasField("crops"):
        parts += _field(CROPS, [item.crops.SerializeToString(), *_data(tensors.crops)])
    if item.HasField("pixels"):
        parts += _field(PIXELS, [item.pixels.SerializeToString(), *_data(tensors.pixels)])
    return parts


def _data(data: Buffer) -> list[Buffer]:
    return _field(DATA, [data]) if len(data) else []


def _field(number: int, parts: list[Buffer]) -> list[Buffer]:
    return [_varint(number << 3 | _LENGTH) + _varint(sum(len(part) for part in parts)), *parts]


def _varint(value: int) -> bytes:
    if value <= 0x7F:
        return _ONE_BYTE[value]
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


# -- reading ---------------------------------------------------------------------------------------


def read_request(raw: bytes) -> Request | Malformed:
    """Parse an EncodeRequest; tensor data are views of `raw`."""
    try:
        rest: list[Buffer] = []
        items: list[pb.Item] = []
        tensors: list[ItemTensors] = []
        for number, field, value in _fields(memoryview(raw)):
            if number == _ITEMS and value is not None:
                item, data = _read_item(value)
                items.append(item)
                tensors.append(data)
            else:
                rest.append(field)
        message = pb.EncodeRequest.FromString(b"".join(rest))
        message.items.extend(items)
        return Request(message, tensors)
    except DecodeError as error:
        return Malformed(str(error))


def read_plain(kind: type[M], raw: bytes) -> M | Malformed:
    """Parse a message without tensors."""
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        return Malformed(str(error))


def read_chunk(kind: type[M], raw: bytes) -> Frame[M] | Malformed:
    """Parse a message of `kind`; the data of its chunk is a view of `raw`."""
    try:
        rest: list[Buffer] = []
        data = _NOTHING
        for number, field, value in _fields(memoryview(raw)):
            if number == CHUNK and value is not None:
                head, data = _cut(value, data)
                rest += _field(CHUNK, [head])
            else:
                rest.append(field)
        return Frame(kind.FromString(b"".join(rest)), data)
    except DecodeError as error:
        return Malformed(str(error))


def _read_item(view: memoryview) -> tuple[pb.Item, ItemTensors]:
    rest: list[Buffer] = []
    data = {PIXELS: _NOTHING, CROPS: _NOTHING}
    encoded = _NOTHING
    for number, field, value in _fields(view):
        if number == ENCODED and value is not None:
            encoded = value
        elif number in data and value is not None:
            head, data[number] = _cut(value, data[number])
            rest += _field(number, [head])
        else:
            rest.append(field)
    return pb.Item.FromString(b"".join(rest)), ItemTensors(data[PIXELS], data[CROPS], encoded)


def _cut(view: memoryview, data: memoryview) -> tuple[bytes, memoryview]:
    """A message without its field 15, and that field's last value, or `data` if there is none."""
    rest: list[Buffer] = []
    for number, field, value in _fields(view):
        if number == DATA and value is not None:
            data = value
        else:
            rest.append(field)
    return b"".join(rest), data


def _fields(view: memoryview) -> Iterator[tuple[int, memoryview, memoryview | None]]:
    """The fields of a message: number, the whole field, and the value if it is length-delimited."""
    position, size, count = 0, len(view), 0
    while position < size:
        start = position
        count += 1
        if count > _MAX_FIELDS:
            raise DecodeError(f"a message has more than {_MAX_FIELDS} fields")
        key, position = _read_varint(view, position)
        value = None
        kind = key & 7
        if kind == _LENGTH:
            length, position = _read_varint(view, position)
            value = view[position : position + length]
            position += length
        elif kind == _VARINT:
            _, position = _read_varint(view, position)
        elif kind in (_FIXED64, _FIXED32):
            position += 8 if kind == _FIXED64 else 4
        else:
            raise DecodeError(f"unknown wire type {kind}")
        if position > size:
            raise DecodeError("a field is longer than its message")
        if key >> 3 == 0:
            raise DecodeError("field number 0")
        yield key >> 3, view[start:position], value


def _read_varint(view: memoryview, position: int) -> tuple[int, int]:
    if position < len(view) and view[position] < 0x80:  # nearly all are short
        return view[position], position + 1
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if position >= len(view):
            raise DecodeError("the message ends within a number")
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position
    raise DecodeError("a number is longer than ten bytes")
