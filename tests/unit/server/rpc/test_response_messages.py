"""The messages of an answer, against what protobuf makes of the same fields."""

from hypothesis import example, given
from hypothesis import strategies as st

from vitwire.v1 import encoder_pb2 as pb
from vitwire_server.core.errors import NotCached
from vitwire_server.core.items import DType, Embedding
from vitwire_server.core.plans import Fallback
from vitwire_server.core.reports import Encoded, ItemReport, Path
from vitwire_server.rpc.response_messages import CHUNK_BYTES, Answer, messages
from vitwire_server.rpc.status import duration, status_of

NUMBERS = {
    DType.FLOAT32: pb.DATA_TYPE_FLOAT32,
    DType.FLOAT16: pb.DATA_TYPE_FLOAT16,
    DType.BFLOAT16: pb.DATA_TYPE_BFLOAT16,
}
kinds = st.sampled_from([pb.EncodeResponse, pb.EncodeStreamResponse])
kept = st.lists(st.integers(0, 300), max_size=3).map(tuple)


def encoded(rows: int, width: int, dtype: DType, kept: tuple[int, ...] = ()) -> Encoded:
    data = bytes(range(251)) * (rows * width * dtype.size // 251 + 1)
    embedding = Embedding(memoryview(data)[: rows * width * dtype.size], dtype, (rows, width), kept)
    return Encoded(embedding, ItemReport(Path.EAGER, Fallback.OVERSIZE, 0, rows, 0.5, 1.25))


def from_protobuf(kind: type[Answer], item: int, outcome: Encoded) -> list[bytes]:
    """The same answer, serialised by protobuf with its data."""
    embedding = outcome.embedding
    rows, width = embedding.shape
    row_bytes = width * embedding.dtype.size
    step = max(1, CHUNK_BYTES // row_bytes)
    answer = []
    for row in range(0, rows, step):
        chunk = pb.EmbeddingChunk(
            data_type=NUMBERS[embedding.dtype],
            shape=[rows, width],
            row=row,
            last=row + step >= rows,
            data=bytes(embedding.data[row * row_bytes : (row + step) * row_bytes]),
        )
        message = kind(item=item, chunk=chunk)
        if chunk.last:
            message.report.path = pb.PATH_EAGER
            message.report.fallback_reason = "oversize"
            message.report.tokens = rows
            message.report.queued.CopyFrom(duration(0.5))
            message.report.encoded.CopyFrom(duration(1.25))
            message.report.kept.extend(embedding.kept)
        answer.append(message.SerializeToString())
    return answer


@given(kinds, st.integers(0, 2**32 - 1), st.integers(1, 300), st.integers(1, 4000), st.sampled_from([*NUMBERS]), kept)
@example(pb.EncodeResponse, 0, 1, 1, DType.FLOAT16, ())
@example(pb.EncodeStreamResponse, 127, 300, 16384, DType.BFLOAT16, ())
@example(pb.EncodeStreamResponse, 128, 3, CHUNK_BYTES // 2 + 1, DType.FLOAT16, ())
def test_rows_are_serialised_as_protobuf_does(
    kind: type[Answer], item: int, rows: int, width: int, dtype: DType, kept: tuple[int, ...]
) -> None:
    outcome = encoded(rows, width, dtype, kept)
    sent = list(messages(kind, item, outcome))
    assert [message.raw for message in sent] == from_protobuf(kind, item, outcome)
    assert sum(message.rows_bytes for message in sent) == len(outcome.embedding.data)
    assert [message.last for message in sent] == [False] * (len(sent) - 1) + [True]
    assert max(message.rows_bytes for message in sent) <= max(CHUNK_BYTES, width * dtype.size)


@given(kinds, st.integers(0, 2**32 - 1))
def test_an_error_is_one_message(kind: type[Answer], item: int) -> None:
    error = NotCached("no embedding is cached")
    (message,) = messages(kind, item, error)
    assert message.raw == kind(item=item, error=status_of(error)).SerializeToString()
    assert message.last
    assert message.rows_bytes == 0
