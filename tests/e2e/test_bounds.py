"""Clients that send nothing, too slowly, or do not read: each is bounded, and what it held comes back."""

import time
from collections.abc import Iterator
from threading import Event

import grpc
import numpy as np
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from checkpoints import Checkpoints
from entered import entered
from load import UNLIMITED, chunk, header
from servers import PIXELS_ONLY, ServerProcess, serving
from vitwire import Client, DeadlineExceeded, Item, Overloaded
from vitwire.v1 import encoder_pb2 as pb
from vitwire.v1.encoder_pb2_grpc import EncoderServiceStub
from waiting import until

COLUMNS = 3 * 2 * 16 * 16
ENCODE = "/vitwire.v1.EncoderService/Encode"
ROWS = 4096
LARGE = pb.Item(
    modality=pb.MODALITY_IMAGE,
    grid=pb.Grid(t=1, h=64, w=64),
    pixels=pb.Tensor(data_type=pb.DATA_TYPE_UINT8, shape=[ROWS, COLUMNS // 2], data=bytes(ROWS * COLUMNS // 2)),
)
SMALL = pb.Item(
    modality=pb.MODALITY_IMAGE,
    grid=pb.Grid(t=1, h=2, w=2),
    pixels=pb.Tensor(data_type=pb.DATA_TYPE_UINT8, shape=[4, COLUMNS], data=bytes(4 * COLUMNS)),
)
BYTES = ("--max-request-bytes", str(16 << 20), "--max-queued-bytes", str(64 << 20), "--cache-bytes", "4000000")
FLAGS = (*PIXELS_ONLY, "--idle-seconds", "1", "--max-queued-items", "3", *BYTES)
"""A patience of a second; messages up to 16 MiB, of which 4 may be received at once."""

server = entered(lambda checkpoints: serving(checkpoints("qwen3_vl"), *FLAGS))
channel = entered(lambda server: grpc.insecure_channel(server.target, UNLIMITED), scope="function")


@pytest.fixture(autouse=True)
def nothing_stays(server: ServerProcess) -> Iterator[None]:
    yield
    until(lambda: not server.metric("vitwire_inflight_requests"), 20)
    assert server.metric("vitwire_tickets_opened_total") == server.metric("vitwire_tickets_closed_total")
    assert server.metric("vitwire_admitted_items") == server.metric("vitwire_admitted_bytes") == 0


def never(end: Event) -> Iterator[bytes]:
    """A client that keeps its stream open and sends nothing."""
    end.wait(30)
    yield from ()


def refused(call: Iterator[object]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as error:
        list(call)
    return error.value


def test_a_request_without_a_message_is_refused_at_once(channel: grpc.Channel) -> None:
    error = refused(channel.stream_stream(ENCODE)(iter([]), timeout=20))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "ended without one" in error.details()


def test_a_message_that_does_not_come_is_not_waited_for(channel: grpc.Channel) -> None:
    end = Event()
    error = refused(channel.stream_stream(ENCODE)(never(end), timeout=20))
    end.set()
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "did not arrive within 1 s" in error.details()


def test_a_dozen_silent_calls_do_not_close_encode_to_others(checkpoints: Checkpoints) -> None:
    """They keep the receive slots for a minute only while no other request waits; here on a separate connection."""
    bounds = ("--max-request-bytes", str(16 << 20), "--max-queued-bytes", str(64 << 20), "--idle-seconds", "60")
    apart = [("grpc.use_local_subchannel_pool", 1)]
    end = Event()
    with serving(checkpoints("qwen3_vl"), *PIXELS_ONLY, *bounds) as server:
        with (
            grpc.insecure_channel(server.target, apart) as silent,
            grpc.insecure_channel(server.target, apart) as other,
        ):
            holding = [silent.stream_stream(ENCODE)(never(end), timeout=60) for _ in range(12)]
            until(lambda: server.metric("vitwire_inflight_requests") >= 12)
            for _ in range(3):
                (answer,) = EncoderServiceStub(other).Encode(pb.EncodeRequest(items=[SMALL]), timeout=20)
                assert answer.chunk.last
            end.set()
            codes = {refused(call).code() for call in holding}
        assert grpc.StatusCode.RESOURCE_EXHAUSTED in codes, "a silent call lost its slot to one that was waiting"
        assert codes <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT}


def test_who_does_not_read_gives_back_what_it_holds(server: ServerProcess, channel: grpc.Channel) -> None:
    """192 MB of cached rows: gRPC takes some of it ahead of the reader, not all."""
    ended = server.metric("vitwire_requests_total", method="Encode", code="DEADLINE_EXCEEDED")
    stub = EncoderServiceStub(channel)
    named = pb.Item()
    named.CopyFrom(LARGE)
    named.content_id = "large"
    list(stub.Encode(pb.EncodeRequest(items=[named], output_type=pb.DATA_TYPE_FLOAT32)))
    asks = [pb.Item(content_id="large")] * 256
    call = stub.Encode(pb.EncodeRequest(items=asks, output_type=pb.DATA_TYPE_FLOAT32))
    until(lambda: server.metric("vitwire_requests_total", method="Encode", code="DEADLINE_EXCEEDED") != ended)
    error = refused(call)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "did not read the response for 1 s" in error.details()


@pytest.mark.parametrize(("data", "pause"), [(None, 0.0), (b"", 0.3), (b"x", 0.3)])
def test_an_upload_that_stalls_ends_its_stream(channel: grpc.Channel, data: bytes | None, pause: float) -> None:
    """3 MB are promised: neither an empty chunk nor a byte now and then is progress."""
    end = Event()

    def messages() -> Iterator[pb.EncodeStreamRequest]:
        yield header(1, LARGE)[0]
        while data is not None and not end.wait(pause):
            yield chunk(1, data)
        end.wait(30)

    error = refused(EncoderServiceStub(channel).EncodeStream(messages(), timeout=30))
    end.set()
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "items[1]: upload stalled at" in error.details()


def test_an_upload_that_keeps_its_rate_is_served(channel: grpc.Channel) -> None:
    """It takes longer than a client may stand still, and no message of it is late."""
    data = bytes([1]) * len(LARGE.pixels.data)

    def messages() -> Iterator[pb.EncodeStreamRequest]:
        yield header(1, LARGE)[0]
        for start in range(0, len(data), 1 << 18):
            time.sleep(0.2)
            yield chunk(1, data[start : start + (1 << 18)])

    *_, answer = EncoderServiceStub(channel).EncodeStream(messages(), timeout=30)
    assert answer.chunk.last


def test_a_full_server_says_when_to_come_back_in_both_ways(server: ServerProcess, channel: grpc.Channel) -> None:
    stub = EncoderServiceStub(channel)
    held = stub.Encode(pb.EncodeRequest(items=[LARGE] * 4))
    until(lambda: server.metric("vitwire_admitted_items") >= 4)
    error = refused(stub.Encode(pb.EncodeRequest(items=[LARGE])))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailers = dict(error.trailing_metadata())
    pushback = int(trailers["grpc-retry-pushback-ms"])
    retry = RetryInfo()
    assert Status.FromString(trailers["grpc-status-details-bin"]).details[0].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == pushback
    assert 100 <= pushback <= 1000
    with Client(server.target, max_retries=0) as client, pytest.raises(Overloaded) as refused_call:
        client.encode([Item(np.zeros((4, COLUMNS), np.uint8), (1, 2, 2))])
    assert refused_call.value.retry_after is not None
    assert 0.1 <= refused_call.value.retry_after <= 1
    assert len(list(held)) >= 4, "a request larger than the queue is served when it is empty"
    assert server.metric("vitwire_rejected_total", reason="items") >= 2


def test_a_deadline_that_cannot_be_met_costs_no_device_time(server: ServerProcess) -> None:
    with Client(server.target) as client:
        client.model()
        ran = server.metric("vitwire_batch_items_count")
        for _ in range(20):
            with pytest.raises(DeadlineExceeded):
                client.encode([Item(np.full((4, COLUMNS), 77, np.uint8), (1, 2, 2))], timeout=0.001)
        assert server.metric("vitwire_batch_items_count") == ran
