"""Requests that are wrong, late or abandoned: each gets its status, and nothing else suffers."""

import time
from collections.abc import Iterator
from queue import SimpleQueue
from threading import Event
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc.error_details_pb2 import BadRequest
from google.rpc.status_pb2 import Status

from checkpoints import Checkpoints
from entered import entered
from load import chunk, header
from servers import PIXELS_ONLY, ServerProcess, serving
from vitwire import Client, EncodeFailed, InvalidItem, Item
from vitwire.v1 import encoder_pb2 as pb
from vitwire.v1.encoder_pb2_grpc import EncoderServiceStub
from vitwire_server.demo.checkpoint import demo_config
from waiting import until

COLUMNS = 3 * 2 * 16 * 16
_VISION: Any = demo_config("qwen3_vl").vision_config
WIDTH = _VISION.out_hidden_size * (1 + len(_VISION.deepstack_visual_indexes))
BOUNDS = ("--max-budget-tokens", "128", "--max-patches-per-item", "4096")
FLAGS = (*PIXELS_ONLY, "--dtype", "float32", "--graphs", "simulated", *BOUNDS)

server = entered(lambda checkpoints: serving(checkpoints("qwen3_vl"), *FLAGS))


def good(rows: int = 16) -> pb.Item:
    data = np.ones((rows, COLUMNS), np.float32)
    tensor = pb.Tensor(data_type=pb.DATA_TYPE_FLOAT32, shape=data.shape, data=data.tobytes())
    return pb.Item(modality=pb.MODALITY_IMAGE, grid=pb.Grid(t=1, h=rows // 2, w=2), pixels=tensor)


def wrong(**changes: Any) -> pb.Item:
    item = good()
    for path, value in changes.items():
        owner, _, name = path.rpartition("__")
        setattr(getattr(item, owner) if owner else item, name, value)
    return item


def fields(error: grpc.RpcError) -> list[str]:
    """The fields that the rich status names."""
    trailers = dict(error.trailing_metadata())
    status = Status.FromString(trailers["grpc-status-details-bin"])
    detail = BadRequest()
    assert status.details[0].Unpack(detail)
    return [violation.field for violation in detail.field_violations]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.EncodeRequest(), "items"),
        (pb.EncodeRequest(items=[good()] * 257), "items"),
        (pb.EncodeRequest(items=[good()], output_type=9), "output_type"),
        (pb.EncodeRequest(items=[good()], priority=9), "priority"),
        (pb.EncodeRequest(items=[good(), wrong(modality=0)]), "items[1].modality"),
        (pb.EncodeRequest(items=[wrong(modality=5)]), "items[0].modality"),
        (pb.EncodeRequest(items=[wrong(grid__h=0)]), "items[0].grid.h"),
        (pb.EncodeRequest(items=[wrong(grid__w=3)]), "items[0].grid.w"),
        (pb.EncodeRequest(items=[wrong(grid__h=1 << 20, grid__w=1 << 20)]), "items[0].grid"),
        (pb.EncodeRequest(items=[wrong(pixels__data_type=8)]), "items[0].pixels.data_type"),
        (pb.EncodeRequest(items=[wrong(pixels__data=b"short")]), "items[0].pixels.data"),
        (pb.EncodeRequest(items=[wrong(grid__h=4)]), "items[0].pixels.shape"),
        (pb.EncodeRequest(items=[wrong(modality=pb.MODALITY_VIDEO, keep_ratio=1.25)]), "items[0].keep_ratio"),
        (pb.EncodeRequest(items=[wrong(keep_ratio=0.5)]), "items[0].keep_ratio"),
    ],
)
def test_a_malformed_request_is_refused_by_name_while_others_go_on(
    request_: pb.EncodeRequest, field: str, stub: EncoderServiceStub
) -> None:
    others = stub.Encode(pb.EncodeRequest(items=[good(256)]))
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Encode(request_))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in fields(refused.value)
    assert [answer.chunk.shape for answer in others] == [[64, WIDTH]]


def test_bytes_that_are_no_message_are_refused(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.target) as channel:
        for method in ("Encode", "EncodeStream"):
            call = channel.stream_stream(f"/vitwire.v1.EncoderService/{method}")
            with pytest.raises(grpc.RpcError) as refused:
                list(call(iter([b"\xff\xff\xff\xff"])))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert fields(refused.value) == ["message"]


class TestEncodeStream:
    def test_items_may_be_interleaved_and_a_wrong_one_fails_alone(self, stub: EncoderServiceStub) -> None:
        (first, a), (second, b), (bad, _) = header(7, good()), header(8, good(64)), header(9, wrong(grid__h=3))
        messages = [
            pb.EncodeStreamRequest(options=pb.EncodeStreamOptions(output_type=pb.DATA_TYPE_FLOAT16)),
            first,
            bad,
            second,
            chunk(7, a[:1000]),
            chunk(9, b"whatever"),
            chunk(8, b),
            chunk(7, a[1000:]),
        ]
        answers = {answer.item: answer for answer in stub.EncodeStream(iter(messages))}
        assert sorted(answers) == [7, 8, 9]
        assert answers[9].error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert "items[9].grid.h" in answers[9].error.message
        assert answers[7].chunk.data_type == pb.DATA_TYPE_FLOAT16
        assert (answers[7].report.tokens, answers[8].report.tokens) == (4, 16)

    def test_an_item_that_stays_incomplete_or_overflows_fails_alone(self, stub: EncoderServiceStub) -> None:
        (short, _), (long, a), (whole, b) = header(1, good()), header(2, good()), header(3, good())
        messages = [short, chunk(1, b"abc"), long, chunk(2, a + b"x"), whole, chunk(3, b)]
        answers = {answer.item: answer for answer in stub.EncodeStream(iter(messages))}
        assert "only 3 of" in answers[1].error.message
        assert "more than the" in answers[2].error.message
        assert answers[3].chunk.last

    @pytest.mark.parametrize(
        ("messages", "field"),
        [
            ([chunk(4, b"abc")], "chunk.item"),
            ([pb.EncodeStreamRequest()], "message"),
            ([header(1, good())[0], header(1, good())[0]], "header.item"),
            ([header(1, good())[0], pb.EncodeStreamRequest(options=pb.EncodeStreamOptions())], "options"),
            ([pb.EncodeStreamRequest(options=pb.EncodeStreamOptions(output_type=4))], "options.output_type"),
        ],
    )
    def test_a_stream_that_makes_no_sense_ends(
        self, messages: list[pb.EncodeStreamRequest], field: str, stub: EncoderServiceStub
    ) -> None:
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.EncodeStream(iter(messages)))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert fields(refused.value) == [field]

    def test_the_number_of_a_refused_item_is_taken_until_it_was_answered(self, stub: EncoderServiceStub) -> None:
        (bad, _), (right, data) = header(1, wrong(grid__h=3)), header(1, good())
        for _ in range(20):
            try:
                answers = list(stub.EncodeStream(iter([bad, right, chunk(1, data)])))
            except grpc.RpcError as refused:
                assert fields(refused) == ["header.item"]
            else:
                assert [answer.WhichOneof("result") for answer in answers] == ["error", "chunk"]

    def test_a_number_may_be_used_again_once_it_was_answered(self, stub: EncoderServiceStub) -> None:
        turns: SimpleQueue[bool] = SimpleQueue()
        turns.put(True)

        def messages() -> Iterator[pb.EncodeStreamRequest]:
            while turns.get():
                head, data = header(5, good())
                yield head
                yield chunk(5, data)

        answers = 0
        for answer in stub.EncodeStream(messages()):
            assert answer.chunk.last
            answers += 1
            turns.put(answers < 20)
        assert answers == 20

    def test_more_items_than_a_request_may_hold_flow_through_one_stream(self, stub: EncoderServiceStub) -> None:
        def messages() -> Iterator[pb.EncodeStreamRequest]:
            for number in range(600):
                head, data = header(number, good())
                yield head
                yield chunk(number, data)

        answers = [answer.item for answer in stub.EncodeStream(messages())]
        assert sorted(answers) == list(range(600))

    def test_a_stream_remembers_so_many_refused_items_and_passes_over_chunks_of_all(
        self, stub: EncoderServiceStub
    ) -> None:
        (bad, _), (right, data) = header(0, wrong(grid__h=3)), header(3, good())
        refused = 5000

        def messages() -> Iterator[pb.EncodeStreamRequest]:
            for number in range(10, 10 + refused):
                bad.header.item = number
                yield bad
            yield from (chunk(number, b"late") for number in (10, 9 + refused))
            yield chunk(4, b"of no item")
            yield right
            yield chunk(3, data)

        *errors, answer = stub.EncodeStream(messages())
        assert {error.error.code for error in errors} == {grpc.StatusCode.INVALID_ARGUMENT.value[0]}
        assert [error.item for error in errors] == list(range(10, 10 + refused))
        assert answer.chunk.last


def test_every_permit_comes_back(server: ServerProcess, stub: EncoderServiceStub) -> None:
    """Cancelled, failed and finished requests leave nothing behind in the queue or in flight."""
    for _ in range(20):
        call = stub.Encode(pb.EncodeRequest(items=[good(1024)] * 4))
        call.cancel()
    with pytest.raises(grpc.RpcError):
        list(stub.Encode(pb.EncodeRequest(items=[good(2048)] * 8), timeout=0.05))
    until(lambda: not server.metric("vitwire_inflight_requests"), 20)
    assert server.metric("vitwire_queue_items") == 0
    assert server.metric("vitwire_queue_bytes") == 0


client = entered(lambda server: Client(server.target), scope="function")


class TestClientErrors:
    """What users of the client see."""

    @pytest.mark.parametrize(("timeout", "code"), [(None, "CANCELLED"), (0.3, "DEADLINE_EXCEEDED")])
    def test_a_request_that_ends_before_its_message_arrived_is_not_invalid(
        self, server: ServerProcess, timeout: float | None, code: str
    ) -> None:
        """gRPC ends the messages of such an RPC just before it cancels its task.

        A deadline may count as a cancellation: the client's passes first, by the time that the request took to arrive.
        """
        header = pb.EncodeStreamHeader(header=good())
        header.header.pixels.ClearField("data")
        sent: dict[str, list[bytes]] = {
            "Encode": [],
            "EncodeStream": [pb.EncodeStreamRequest(header=header).SerializeToString()],
        }
        counted_as = {code, "CANCELLED"}

        def counts() -> list[float]:
            ended = [
                sum(server.metric("vitwire_requests_total", method=method, code=code) for code in counted_as)
                for method in sent
            ]
            invalid = server.metric("vitwire_requests_total", code="INVALID_ARGUMENT")
            return [*ended, invalid, server.metric("vitwire_items_failed_total")]

        before = counts()
        for method, messages in sent.items():
            with grpc.insecure_channel(server.target) as channel:
                silent = Event()

                def requests(messages: list[bytes] = messages, silent: Event = silent) -> Iterator[bytes]:
                    yield from messages
                    silent.wait(10)

                call = channel.stream_stream(f"/vitwire.v1.EncoderService/{method}")(
                    requests(), timeout=timeout, metadata=[("x-vitwire-acknowledge", "1")]
                )
                call.initial_metadata()
                time.sleep(0.1)
                if timeout is None:
                    call.cancel()
                assert call.code() is grpc.StatusCode[code]
                silent.set()
        time.sleep(0.5)
        assert [after - then for after, then in zip(counts(), before, strict=True)] == [1, 1, 0, 0]

    def test_non_finite_embedding_is_withheld(self, server: ServerProcess, client: Client) -> None:
        """NaN that came in is the client's mistake; NaN that the tower made of finite pixels is the server's."""
        pixels = [np.full((16, COLUMNS), value, np.float32) for value in (np.nan, 0.5, 3e38)]
        before = {code: server.metric("vitwire_requests_total", code=code) for code in ("OK", "INTERNAL")}
        results = dict(client.iter_encode([Item(x, (1, 8, 2)) for x in pixels], return_exceptions=True))
        assert isinstance(results[0], InvalidItem)
        assert [violation.field for violation in results[0].violations] == ["items[0].pixels.data"]
        assert "holds NaN or infinity" in str(results[0])
        assert isinstance(results[2], EncodeFailed)
        assert str(results[2]).startswith("the embedding of this image"), "its pixels were finite"
        assert not isinstance(results[1], Exception)
        assert np.isfinite(results[1].numpy()).all()
        assert server.metric("vitwire_nonfinite_total") == 1
        assert server.metric("vitwire_requests_total", code="INTERNAL") == before["INTERNAL"] + 1
        assert server.metric("vitwire_requests_total", code="OK") <= before["OK"] + 1, "GetModel at most"

    def test_a_request_of_nan_is_no_ok_and_its_log_line_has_its_id(self, server: ServerProcess) -> None:
        data = np.full((2, 4, COLUMNS), np.nan, np.float32)
        grid = pb.Grid(t=1, h=2, w=2)
        tensors = [pb.Tensor(data_type=pb.DATA_TYPE_FLOAT32, shape=[4, COLUMNS], data=x.tobytes()) for x in data]
        items = [pb.Item(modality=pb.MODALITY_IMAGE, grid=grid, pixels=tensor) for tensor in tensors]
        before = server.metric("vitwire_requests_total", method="Encode", code="INVALID_ARGUMENT")
        with grpc.insecure_channel(server.target) as channel:
            call = EncoderServiceStub(channel).Encode(
                pb.EncodeRequest(items=items), metadata=[("x-request-id", "nan-7")]
            )
            errors = {answer.item: answer.error.message for answer in call}
        assert errors == {i: f"items[{i}].pixels.data: holds NaN or infinity" for i in range(2)}
        assert server.metric("vitwire_requests_total", method="Encode", code="INVALID_ARGUMENT") == before + 1
        (line,) = [line for line in server.log().splitlines() if "[request nan-7]" in line]
        assert "WARNING" in line
        assert "items [0, 1] failed in a batch of 2: pixels.data: holds NaN or infinity" in line


def test_requests_larger_than_the_queue_are_served(checkpoints: Checkpoints) -> None:
    flags = ("--max-queued-items", "2", "--max-queued-bytes", "100000")
    with serving(checkpoints("qwen3_vl"), *PIXELS_ONLY, *flags) as process, Client(process.target) as client:
        small = [Item(np.zeros((16, COLUMNS), np.float32), (1, 8, 2))] * 20
        assert len(client.encode(small)) == 20
        large = [Item(np.zeros((1024, COLUMNS), np.float32), (1, 32, 32))] * 4
        assert len(client.encode(large)) == 4, "a stream waits for what it holds itself"


def test_a_flood_of_tiny_fields_is_refused_at_once(server: ServerProcess, stub: EncoderServiceStub) -> None:
    with grpc.insecure_channel(server.target) as channel:
        call = channel.unary_stream("/vitwire.v1.EncoderService/Encode")
        for flood in (b"\x0a\x00" * 400_000, b"\x78\x01" * 400_000):
            with pytest.raises(grpc.RpcError) as refused:
                list(call(flood, timeout=5))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    many = pb.EncodeRequest(items=[pb.Item()] * 200)
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Encode(many))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, "the details fit into the trailers"
