"""Messages as no client of ours sends them: fields altered, bytes moved about, streams out of order."""

import base64
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from load import COLUMNS, image
from vitwire.v1 import encoder_pb2 as pb

Draw = Callable[[st.SearchStrategy[Any]], Any]

_UINT32 = st.one_of(
    st.integers(0, 64), st.sampled_from([2**16, 2**31 - 1, 2**31, 2**32 - 1]), st.integers(0, 2**32 - 1)
)
_UINT64 = st.one_of(st.integers(0, 4096), st.sampled_from([2**31, 2**32, 2**62, 2**63, 2**64 - 1]))
_INT64 = st.one_of(st.integers(-1, 9000), st.sampled_from([2**31, 2**63 - 1, -(2**63)]))
_ENUM = st.one_of(st.integers(0, 6), st.sampled_from([-1, 99, 2**31 - 1, -(2**31)]))
_FLOAT = st.one_of(st.floats(width=32), st.sampled_from([0.0, 0.5, 1.0, -0.0, 1e-30]))
_DATA = st.one_of(st.binary(max_size=64), st.integers(0, 1 << 18).map(bytes))
_PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg==")
_TEXT = st.one_of(st.text(max_size=20), st.integers(0, 2000).map("x".__mul__))
_FIELDS = (
    *(("", "modality", _ENUM), ("", "content_id", _TEXT), ("", "keep_ratio", _FLOAT)),
    *(("pixels", "data_type", _ENUM), ("pixels", "data", _DATA)),
)
"""Owner and name of fields that are altered alone, and their values."""


@st.composite
def items(draw: Draw) -> pb.Item:
    """An item with none or some of its fields altered."""
    found = image(*draw(st.sampled_from([(2, 2), (4, 2), (8, 8), (2, 32), (40, 40)])))
    if draw(st.booleans()):
        found.content_id = draw(st.sampled_from(["a", "b", "c"]))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 3]))):
        draw(st.sampled_from(_ALTERATIONS))(found, draw)
    return found


def _field(item: pb.Item, draw: Draw) -> None:
    owner, name, values = draw(st.sampled_from(_FIELDS))
    setattr(getattr(item, owner) if owner else item, name, draw(values))


def _grid(item: pb.Item, draw: Draw) -> None:
    setattr(item.grid, draw(st.sampled_from("thw")), draw(_UINT32))


def _shape(item: pb.Item, draw: Draw) -> None:
    item.pixels.shape[:] = draw(st.lists(_UINT64, max_size=6))


def _cut(item: pb.Item, draw: Draw) -> None:
    item.pixels.data = item.pixels.data[: draw(st.integers(0, 4096))]


def _without(item: pb.Item, draw: Draw) -> None:
    item.ClearField(draw(st.sampled_from(["pixels", "grid", "modality"])))


def _encoded(item: pb.Item, draw: Draw) -> None:
    """A file in the place of pixels, or beside them; most are broken."""
    item.encoded = draw(st.sampled_from([b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", _PNG])) + draw(st.binary(max_size=200))
    if draw(st.integers(0, 3)):
        for name in ("pixels", "grid"):
            item.ClearField(name)


def _crops(item: pb.Item, draw: Draw) -> None:
    del draw
    item.crops.CopyFrom(item.pixels)


def _clip(item: pb.Item, draw: Draw) -> None:
    item.modality = pb.MODALITY_VIDEO
    item.grid.t = draw(st.integers(1, 4))
    _fill(item, pb.DATA_TYPE_UINT8, b"\x80")


def _floats(item: pb.Item, draw: Draw) -> None:
    """Any floats, NaN and infinity among them."""
    _fill(item, draw(st.sampled_from([1, 2, 3])), draw(st.binary(min_size=4, max_size=4)))


def _fill(item: pb.Item, dtype: Any, pattern: bytes) -> None:
    """As many bytes as the grid asks for, unless it asks for too many to be sent again and again."""
    rows = item.grid.t * item.grid.h * item.grid.w
    if rows <= _MOST_ROWS:
        item.pixels.data_type = dtype
        item.pixels.shape[:] = [rows, COLUMNS]
        size = {pb.DATA_TYPE_FLOAT32: 4, pb.DATA_TYPE_UINT8: 1}.get(dtype, 2)
        item.pixels.data = pattern * (rows * COLUMNS * size // len(pattern))


def _options(item: pb.Item, draw: Draw) -> None:
    setattr(item.options, draw(st.sampled_from(["min_pixels", "max_pixels"])), draw(_INT64))


_MOST_ROWS = 256
_ALTERATIONS = (
    *(*[_field] * len(_FIELDS), _grid, _shape, _cut, _without, _crops, _encoded),
    *(_clip, _clip, _floats, _floats, _options),
)


@st.composite
def requests(draw: Draw) -> bytes:
    """An `EncodeRequest`, altered in its fields, and sometimes in its bytes."""
    options = {"output_type": draw(_ENUM), "priority": draw(_ENUM)} if draw(st.integers(0, 4)) == 0 else {}
    message = pb.EncodeRequest(items=draw(st.lists(items(), max_size=4)), **options)
    raw: bytes = draw(mangled(message.SerializeToString()))
    return raw


@st.composite
def uploads(draw: Draw) -> list[bytes]:
    """The messages of an `EncodeStream`: whole items, in an order that was meddled with."""
    sent: list[pb.EncodeStreamRequest] = []
    if draw(st.booleans()):
        options = pb.EncodeStreamOptions(output_type=draw(_ENUM), priority=draw(_ENUM))
        sent.append(pb.EncodeStreamRequest(options=options))
    for number, item in enumerate(draw(st.lists(items(), max_size=3))):
        sent += _upload(number, item, draw(st.sampled_from([1 << 20, 1000, 4097])))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2, 5]))):
        _meddle(sent, draw)
    return [draw(mangled(each.SerializeToString())) for each in sent]


def _upload(number: int, item: pb.Item, step: int) -> list[pb.EncodeStreamRequest]:
    head = pb.Item()
    head.CopyFrom(item)
    head.pixels.data = head.crops.data = b""
    if not item.HasField("crops"):
        head.ClearField("crops")
    if not item.HasField("pixels"):
        head.ClearField("pixels")
    header = pb.EncodeStreamRequest(header=pb.EncodeStreamHeader(item=number, header=head))
    data = item.pixels.data + item.crops.data
    chunks = [data[start : start + step] for start in range(0, min(len(data), 64 * step), step)]
    return [header, *(pb.EncodeStreamRequest(chunk=pb.EncodeStreamChunk(item=number, data=each)) for each in chunks)]


def _meddle(sent: list[pb.EncodeStreamRequest], draw: Draw) -> None:
    """Move, lose, repeat or insert a message."""
    if not sent:
        sent.append(pb.EncodeStreamRequest())
        return
    here, there = (draw(st.integers(0, len(sent) - 1)) for _ in range(2))
    match draw(st.integers(0, 5)):
        case 0:
            sent[here], sent[there] = sent[there], sent[here]
        case 1:
            del sent[here]
        case 2:
            sent.insert(there, sent[here])
        case 3:
            sent.insert(there, pb.EncodeStreamRequest())
        case 4:
            chunk = pb.EncodeStreamChunk(item=draw(_UINT32), data=draw(_DATA))
            sent.insert(there, pb.EncodeStreamRequest(chunk=chunk))
        case 5:
            header = pb.EncodeStreamHeader(item=draw(_UINT32))
            sent.insert(there, pb.EncodeStreamRequest(header=header))


@st.composite
def mangled(draw: Draw, raw: bytes) -> bytes:
    """The bytes, most often as they are."""
    if draw(st.integers(0, 5)):
        return raw
    here, there = sorted(draw(st.integers(0, len(raw))) for _ in range(2))
    few = draw(st.binary(min_size=1, max_size=12))
    changed: bytes = draw(
        st.sampled_from(
            [
                raw[:here],
                raw[:here] + raw[there:],
                raw[:here] + few + raw[here:],
                raw[:here] + few + raw[here + len(few) :],
                raw[:there] + raw[here:],
                few,
                raw[:here] + b"\xff" * 10 + b"\x01" + raw[here:],
                b"\x0a\xff\xff\xff\xff\x0f" + raw,
                raw + b"\x0a\x00" * 3000,
            ]
        )
    )
    return changed


@st.composite
def headers(draw: Draw) -> Sequence[tuple[str, str | bytes]]:
    """Metadata: ids, traces and tokens that make sense, and that do not."""
    printable = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=80)
    names = st.sampled_from(["x-request-id", "traceparent", "tracestate", "authorization", "x-anything"])
    pairs: list[tuple[str, str | bytes]] = draw(st.lists(st.tuples(names, printable), max_size=3))
    if draw(st.integers(0, 9)) == 0:
        pairs.append(("x-anything-bin", draw(st.binary(max_size=200))))
    return pairs


def _bad_item() -> list[bytes]:
    """A stream of two items, of which only the first is to be refused."""
    bad, good = image(8, 8), image(4, 2)
    bad.grid.h = 3
    return [each.SerializeToString() for number, item in enumerate((bad, good)) for each in _upload(number, item, 4097)]


GOOD_REQUEST = pb.EncodeRequest(items=[image(8, 8)]).SerializeToString()
BAD_REQUEST = pb.EncodeRequest().SerializeToString()
BAD_ITEM = _bad_item()
"""Messages of known outcomes: served, refused whole, refused in one item."""
