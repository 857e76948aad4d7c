"""The protocol without I/O: packing, streaming, putting together, and servers that do not keep to it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fake_service import bad_request, expected, item, model_message
from vitwire import EncodeFailed, InvalidItem, Item, NotCached
from vitwire._delivery.answers import Expected
from vitwire._delivery.assembler import Assembler
from vitwire._transport.balancing import Balancing
from vitwire._transport.protocol import CHUNK_BYTES, ONE_MESSAGE_BYTES, Options, Part, parts_of
from vitwire.embeddings import Embedding, RowGroup
from vitwire.model import Limits, Model
from vitwire.v1 import encoder_pb2 as pb
from vitwire.wire import Frame, Malformed, write_chunk, write_request

OPTIONS = Options.of("float16", "batch")
MIB = 1 << 20
LIMITS = Limits(request_bytes=0, items_per_request=0, patches_per_item=0, queued_items=0, queued_bytes=0)
MODEL = replace(Model.from_message(model_message()), limits=LIMITS)


def sized(size: int, **kwargs: Any) -> Item:
    return Item(np.zeros((1, size), np.uint8), (1, 1, 1), **kwargs)


def split(items: dict[int, Item], options: Options, count: int, model: Model) -> list[Part]:
    return parts_of(items, Balancing(count).shares(items, model, 1), options, model)


def only(items: list[Item]) -> Part:
    (part,) = split(dict(enumerate(items)), OPTIONS, 1, MODEL)
    return part


def test_a_request_is_what_protobuf_would_write() -> None:
    items = [item(2, 3.0), item(1, 4.0, content_id="x")]
    message = pb.EncodeRequest.FromString(write_request(only(items).request()))
    assert (message.output_type, message.priority) == (pb.DATA_TYPE_FLOAT16, pb.PRIORITY_BATCH)
    assert [each.content_id for each in message.items] == ["", "x"]
    assert [each.pixels.data for each in message.items] == [
        np.full(each.pixels.size, bits, "<u2").tobytes() for each, bits in zip(items, (0x4040, 0x4080), strict=True)
    ]


@pytest.mark.parametrize(
    ("items", "one"),
    [
        ([sized(10)], True),
        ([sized(ONE_MESSAGE_BYTES)], False),
        ([sized(ONE_MESSAGE_BYTES - 100)], True),
        ([sized(ONE_MESSAGE_BYTES // 2)] * 2, False),
        ([sized(1)] * 1000, True),
        ([sized(10, content_id="x" * ONE_MESSAGE_BYTES)], False),
    ],
    ids=range(6),
)
def test_one_message_stays_within_its_bound(items: list[Item], one: bool) -> None:
    part = only(items)
    assert part.one_message is one
    if one:
        assert len(write_request(part.request())) <= ONE_MESSAGE_BYTES


def test_an_upload_sends_options_then_headers_and_chunks() -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (1, 2 * MIB + 5), np.uint8)
    crops = np.arange(6, dtype=np.uint8).reshape(2, 3)
    part = only([Item(pixels, (1, 1, 1), crops=crops), sized(3)])
    raw = [pb.EncodeStreamRequest.FromString(write_chunk(frame)) for frame in part.uploads()]
    kinds = [message.WhichOneof("message") for message in raw]
    assert kinds == ["options", "header", "chunk", "chunk", "chunk", "chunk", "header", "chunk"]
    assert raw[0].options.output_type == pb.DATA_TYPE_FLOAT16
    assert raw[1].header.header.pixels.shape == [1, 2 * MIB + 5]
    assert not raw[1].header.header.pixels.data
    assert [message.chunk.item for message in raw if message.HasField("chunk")] == [0, 0, 0, 0, 1]
    sent = b"".join(message.chunk.data for message in raw[2:6])
    assert sent == pixels.tobytes() + crops.tobytes()
    assert max(len(message.chunk.data) for message in raw) == CHUNK_BYTES


def test_upload_chunks_are_views() -> None:
    pixels = np.zeros((1, 2 * MIB), np.uint8)
    chunks = [frame.data for frame in only([Item(pixels, (1, 1, 1))]).uploads()]
    assert all(np.shares_memory(np.frombuffer(chunk, np.uint8), pixels) for chunk in chunks if len(chunk))


def test_parts_are_balanced_and_none_is_empty() -> None:
    sizes = (400, 4, 4, 240, 160, 4)
    items = [Item(np.zeros((size, 1), np.uint8), (1, 2, size // 2)) for size in sizes]
    parts = split(dict(enumerate(items)), OPTIONS, 2, MODEL)
    assert sorted(index for part in parts for index in part.indices) == list(range(6))
    loads = [sum(each.size for each in part.items) for part in parts]
    assert max(loads) - min(loads) <= 12
    for part in parts:
        assert part.indices == tuple(sorted(part.indices))
    assert [part.indices for part in split({0: sized(1)}, OPTIONS, 4, MODEL)] == [(0,)]
    assert split({}, OPTIONS, 4, MODEL) == []


def test_what_the_server_takes_in_no_message_goes_as_a_stream() -> None:
    few = replace(LIMITS, items_per_request=2)
    small = replace(LIMITS, request_bytes=1000)
    for limits, count in ((few, 3), (small, 1)):
        (part,) = split(dict.fromkeys(range(count), sized(2000)), OPTIONS, 1, replace(MODEL, limits=limits))
        assert not part.one_message
    (part,) = split({0: sized(1)}, Options.of(None, "batch", stream=True), 1, MODEL)
    assert not part.one_message, "a request may be a stream however small"


# -- putting together --------------------------------------------------------------------------------

F32 = pb.DATA_TYPE_FLOAT32


def chunk(
    data: bytes, *, number: int = 0, row: int = 0, last: bool = False, shape: Any = (4, 12), kind: Any = F32
) -> Frame[pb.EncodeResponse]:
    body = pb.EmbeddingChunk(data_type=kind, shape=shape, row=row, last=last)
    return Frame(pb.EncodeResponse(item=number, chunk=body), memoryview(data))


ROWS = expected(4, 1.0)


def test_chunks_of_several_items_may_be_interleaved() -> None:
    assembler = Assembler((5, 9), 2)
    assert assembler.feed(chunk(ROWS[:1].tobytes())) is None
    assert assembler.feed(chunk(ROWS[:3].tobytes(), number=1)) is None
    first = assembler.feed(chunk(ROWS[3:].tobytes(), number=1, row=3, last=True))
    assert assembler.feed(chunk(b"", row=1)) is None
    second = assembler.feed(chunk(ROWS[1:].tobytes(), row=1, last=True))
    assembler.finish()
    for result, index in ((first, 9), (second, 5)):
        assert result is not None
        assert result[0] == index
        assert isinstance(result[1], Embedding)
        np.testing.assert_array_equal(result[1].numpy(), ROWS)
        assert result[1].levels == 2


def test_a_retry_repeats_no_group_of_rows() -> None:
    given, found = {5: 0}, []
    for sent in (1, 3):
        assembler = Assembler((5,), 2, grouped=given)
        found += [assembler.feed(chunk(ROWS[row : row + 1].tobytes(), row=row)) for row in range(sent)]
    assert [each[1].row for each in found if each and isinstance(each[1], RowGroup)] == [0, 1, 2]


def test_an_empty_embedding_is_one() -> None:
    result = Assembler((0,), 0).feed(chunk(b"", shape=(0, 12), last=True))
    assert result is not None
    assert isinstance(result[1], Embedding)
    assert result[1].shape == (0, 12)


def test_violations_name_the_callers_position() -> None:
    message = pb.EncodeResponse(item=1)
    message.error.code = 3
    message.error.details.add().Pack(bad_request("items[1].pixels"))
    result = Assembler((3, 8), 0).feed(Frame(message))
    assert result is not None
    assert isinstance(result[1], InvalidItem)
    assert (result[1].item, result[1].violations[0].field) == (8, "items[8].pixels")


def test_an_error_ends_its_item_only() -> None:
    assembler = Assembler((3, 4), 0)
    assembler.feed(chunk(ROWS[:1].tobytes()))
    message = pb.EncodeResponse(item=0)
    message.error.code = 5
    result = assembler.feed(Frame(message))
    assert result is not None
    assert isinstance(result[1], NotCached)
    assert (result[0], result[1].item) == (3, 3)
    with pytest.raises(EncodeFailed, match=r"\[4\]") as raised:
        assembler.finish()
    assert raised.value.item == 4


FULL = ROWS.tobytes()


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([Malformed("why")], "why"),
        ([Frame(pb.EncodeResponse(item=0))], "neither"),
        ([chunk(FULL, number=7)], "item 7"),
        ([chunk(FULL, last=True), chunk(FULL, last=True)], "unknown or already answered"),
        ([chunk(FULL, row=1)], "row 1"),
        ([chunk(FULL[:48]), chunk(FULL[:48])], "row 0, expected row 1"),
        ([chunk(FULL[:48]), chunk(FULL, row=1)], "bytes"),
        ([chunk(FULL + FULL)], "bytes"),
        ([chunk(FULL[:50])], "50 bytes"),
        ([chunk(FULL[:48], last=True)], "1 of 4"),
        ([chunk(FULL[:48]), chunk(FULL[:48], row=1, shape=(5, 12))], "changed"),
        ([chunk(FULL[:48]), chunk(FULL[:48], row=1, kind=pb.DATA_TYPE_FLOAT16)], "changed"),
        ([chunk(FULL, kind=pb.DATA_TYPE_UINT8)], "type"),
        ([chunk(FULL, kind=99)], "type"),
        ([chunk(FULL, shape=())], "shape"),
        ([chunk(FULL, shape=(4,))], "shape"),
        ([chunk(FULL, shape=(4, 0))], "shape"),
        ([chunk(FULL, shape=(4, 13))], "shape"),
        ([chunk(FULL, shape=(4, 1, 1, 1, 12))], "shape"),
        ([chunk(b"", shape=(2**20, 1200))], "announced"),
        ([chunk(b"", shape=(2**63, 2**63, 12))], "announced"),
    ],
)
def test_a_server_that_breaks_the_contract_is_not_believed(frames: list[Any], reason: str) -> None:
    assembler = Assembler((0,), 2)
    for frame in frames[:-1]:
        assembler.feed(frame)
    with pytest.raises(EncodeFailed, match=reason):
        assembler.feed(frames[-1])


def test_rows_of_an_item_that_is_only_stored_come_from_an_older_server() -> None:
    with pytest.raises(EncodeFailed, match=r"items\[3\]: .*older than this client"):
        Assembler((3,), 2, store_only=True).feed(chunk(FULL, last=True))


def rules(make: Item) -> list[Expected]:
    return [Expected.of(make, MODEL)]


CLIP = Item(np.zeros((32, 6), np.float32), (2, 8, 2), "video", keep_ratio=0.6)
BF16 = pb.DATA_TYPE_BFLOAT16


@pytest.mark.parametrize(
    ("asked", "shape", "reason"),
    [
        (item(4), (5, 12), "items.0.: .*5 rows, expected 4"),
        (item(4), (4, 24), "items.0.: .*width 24, expected 12"),
        (replace(CLIP, keep_ratio=0.0), (9, 12), "9 rows, expected at most 8"),
        (CLIP, (8, 12), "8 rows, expected 4"),
    ],
)
def test_shapes_are_those_of_the_item_and_the_model(asked: Item, shape: tuple[int, int], reason: str) -> None:
    data = np.zeros(shape, np.float32).tobytes()
    with pytest.raises(EncodeFailed, match=reason) as raised:
        Assembler((0,), 2, rules(asked)).feed(chunk(data, shape=shape, last=True))
    assert raised.value.item == 0


def test_fewer_rows_come_of_pooling_and_of_pruning() -> None:
    for asked in (CLIP, replace(CLIP, keep_ratio=0.0)):
        result = Assembler((0,), 2, rules(asked)).feed(chunk(ROWS.tobytes(), last=True))
        assert result is not None
        assert isinstance(result[1], Embedding)
        assert result[1].grid == (2, 8, 2)


@pytest.mark.parametrize("report", [pb.ItemReport(tokens=5), pb.ItemReport(kept=[1]), pb.ItemReport(kept=[0, 2, 2, 3])])
def test_a_report_fits_the_rows(report: pb.ItemReport) -> None:
    frame = chunk(ROWS.tobytes(), last=True)
    frame.message.report.CopyFrom(report)
    with pytest.raises(EncodeFailed, match="4 rows with"):
        Assembler((0,), 2).feed(frame)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", [F32, pb.DATA_TYPE_FLOAT16, BF16])
def test_values_that_are_not_finite_fail_their_item_only(value: float, kind: Any) -> None:
    largest = {F32: np.finfo(np.float32).max, pb.DATA_TYPE_FLOAT16: 65504.0, BF16: 3.38953e38}[kind]
    assembler = Assembler((3, 7), 2)
    for number, (worst, whole) in enumerate(((value, False), (largest, True))):
        rows = np.array([[1.0, -largest, worst, -0.0] * 3] * 4, np.float32)
        bits = (rows.view(np.uint32) >> 16).astype(np.uint16) if kind == BF16 else rows
        data = rows.astype(np.float16) if kind == pb.DATA_TYPE_FLOAT16 else bits
        result = assembler.feed(chunk(data.tobytes(), number=number, kind=kind, last=True))
        assert result is not None
        assert result[0] == (3, 7)[number]
        if whole:
            assert isinstance(result[1], Embedding)
        else:
            assert isinstance(result[1], EncodeFailed)
            assert "items[3]: the server sent NaN" in str(result[1])
    assembler.finish()
