"""wire.py against protobuf: the same bytes out, the same messages in, and no exception over any bytes."""

from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from google.rpc.status_pb2 import Status
from hypothesis import example, given
from hypothesis import strategies as st

from vitwire import wire
from vitwire.v1 import encoder_pb2 as pb

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
enums = st.integers(-(2**31), 2**31 - 1)
data = st.binary(max_size=64)
shapes = st.lists(u64, max_size=3)
text = st.text(max_size=5)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


tensors = st.builds(pb.Tensor, data_type=enums, shape=shapes, data=data)
items = st.builds(
    pb.Item,
    modality=enums,
    grid=maybe(st.builds(pb.Grid, t=u32, h=u32, w=u32)),
    content_id=text,
    keep_ratio=st.floats(width=32, allow_nan=False),
    encoded=data,
    crops=maybe(tensors),
    pixels=maybe(tensors),
)
requests = st.builds(pb.EncodeRequest, items=st.lists(items, max_size=3), output_type=enums, priority=enums)
chunks = st.builds(pb.EmbeddingChunk, data_type=enums, shape=shapes, row=u64, last=st.booleans(), data=data)
reports = st.builds(pb.ItemReport, path=enums, fallback_reason=text, kept=st.lists(u32, max_size=4))
statuses = st.builds(Status, code=enums, message=text)


def responses(kind: type[Message]) -> st.SearchStrategy[Any]:
    return st.builds(kind, item=u32, report=maybe(reports), chunk=chunks) | st.builds(
        kind, item=u32, report=maybe(reports), error=maybe(statuses)
    )


uploads = st.one_of(
    st.builds(pb.EncodeStreamRequest, options=st.builds(pb.EncodeStreamOptions, output_type=enums)),
    st.builds(pb.EncodeStreamRequest, header=st.builds(pb.EncodeStreamHeader, item=u32, header=maybe(items))),
    st.builds(pb.EncodeStreamRequest, chunk=st.builds(pb.EncodeStreamChunk, item=u32, data=data)),
)
chunked = st.one_of(responses(pb.EncodeResponse), responses(pb.EncodeStreamResponse), uploads)


def mutations(messages: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """Serialised messages with bytes put in, taken out or changed; and bytes of any kind."""

    @st.composite
    def mutated(draw: st.DrawFn) -> bytes:
        raw = bytearray(draw(messages).SerializeToString())
        for _ in range(draw(st.integers(0, 3))):
            start = draw(st.integers(0, len(raw)))
            end = min(len(raw), start + draw(st.integers(0, 3)))
            raw[start:end] = draw(st.binary(max_size=3))
        return bytes(raw)

    return mutated() | st.lists(mutated(), max_size=3).map(b"".join) | st.binary(max_size=64)


def whole_request(read: wire.Request) -> pb.EncodeRequest:
    """The message with the data put back."""
    message = pb.EncodeRequest()
    message.CopyFrom(read.message)
    for sent, views in zip(message.items, read.tensors, strict=True):
        assert not sent.pixels.data
        assert not sent.crops.data
        assert not sent.encoded
        sent.encoded = bytes(views.encoded)
        if len(views.pixels):
            sent.pixels.data = bytes(views.pixels)
        if len(views.crops):
            sent.crops.data = bytes(views.crops)
    return message


def whole_chunk(read: wire.Frame[Any]) -> Message:
    message = type(read.message)()
    message.CopyFrom(read.message)
    if message.HasField("chunk"):
        assert not message.chunk.data
        if len(read.data):
            message.chunk.data = bytes(read.data)
    return message


def without_data(message: pb.EncodeRequest) -> wire.Request:
    bare = pb.EncodeRequest()
    bare.CopyFrom(message)
    views = []
    for sent in bare.items:
        views.append(wire.ItemTensors(*map(memoryview, (sent.pixels.data, sent.crops.data, sent.encoded))))
        sent.ClearField("encoded")
        for name in ("pixels", "crops"):
            if sent.HasField(name):
                getattr(sent, name).ClearField("data")
    return wire.Request(bare, views)


@given(requests)
def test_requests_are_written_as_protobuf_does(message: pb.EncodeRequest) -> None:
    assert wire.write_request(without_data(message)) == message.SerializeToString()


@given(chunked)
def test_chunks_are_written_as_protobuf_does(message: Any) -> None:
    bare = type(message)()
    bare.CopyFrom(message)
    sent = b""
    if message.HasField("chunk"):
        sent = message.chunk.data
        bare.chunk.ClearField("data")
    assert wire.write_chunk(wire.Frame(bare, memoryview(sent))) == message.SerializeToString()


@given(requests)
def test_requests_are_read_as_protobuf_does(message: pb.EncodeRequest) -> None:
    read = wire.read_request(message.SerializeToString())
    assert isinstance(read, wire.Request)
    assert whole_request(read) == message


@given(chunked)
def test_chunks_are_read_as_protobuf_does(message: Any) -> None:
    read = wire.read_chunk(type(message), message.SerializeToString())
    assert isinstance(read, wire.Frame)
    assert whole_chunk(read) == message


def parsed(message: Message, raw: bytes) -> bool:
    try:
        message.ParseFromString(raw)
    except DecodeError:
        return False
    return True


def same(one: Message, other: Message) -> bool:
    """Equal, NaN included."""
    return one.SerializeToString(deterministic=True) == other.SerializeToString(deterministic=True)


@given(mutations(requests))
@example(b"\x7a\x00")
@example(b"\x0a\x02\x7a\x00")
@example(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")
def test_hostile_requests_are_refused_or_read_as_protobuf_does(raw: bytes) -> None:
    read, message = wire.read_request(raw), pb.EncodeRequest()
    if parsed(message, raw) and isinstance(read, wire.Request):
        assert same(whole_request(read), message)


@pytest.mark.parametrize("kind", [pb.EncodeResponse, pb.EncodeStreamResponse, pb.EncodeStreamRequest])
@given(raw=mutations(chunked))
def test_hostile_chunks_are_refused_or_read_as_protobuf_does(kind: type[Message], raw: bytes) -> None:
    read, message = wire.read_chunk(kind, raw), kind()
    if parsed(message, raw) and isinstance(read, wire.Frame):
        if not message.chunk.data:  # a chunk, an error, and again a chunk: the oneof forgets the first one's data
            read = wire.Frame(read.message)
        assert same(whole_chunk(read), message)


def test_what_is_read_are_views_of_what_came() -> None:
    raw = pb.EncodeResponse(chunk=pb.EmbeddingChunk(data=bytes(1000))).SerializeToString()
    read = wire.read_chunk(pb.EncodeResponse, raw)
    assert isinstance(read, wire.Frame)
    assert isinstance(read.data, memoryview)
    assert read.data.obj is raw
