"""Embeddings that the server writes into the client's memory through NIXL."""

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import grpc
import numpy as np
import pytest

from both_clients import Call, both
from checkpoints import Checkpoints
from entered import entered
from load import header, image, request
from servers import PIXELS_ONLY, ServerProcess, serving
from vitwire import AsyncClient, Client, EncodeFailed, Item
from vitwire.shared.agents import is_installed
from vitwire.v1 import encoder_pb2 as pb
from vitwire.v1.encoder_pb2_grpc import EncoderServiceStub

pytestmark = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed")
COLUMNS = 3 * 2 * 14 * 14
FLAGS = ("--nixl", "--nixl-seconds", "60", "--graphs", "off", "--cache-bytes", str(1 << 20), *PIXELS_ONLY)

server = entered(lambda checkpoints: serving(checkpoints("qwen2_vl"), *FLAGS))


def items(count: int, side: int = 8, seed: int = 0) -> list[Item]:
    random = np.random.default_rng(seed)
    pixels = random.standard_normal((count, side * side, COLUMNS), dtype=np.float32)
    return [Item(each, (1, side, side)) for each in pixels]


def delivered(server: ServerProcess, way: str) -> float:
    return server.metric("vitwire_delivered_bytes_total", way=way)


def plain(server: ServerProcess, wanted: list[Item], **options: Any) -> list[np.ndarray]:
    """The rows as the stream brings them."""
    with Client(server.target, delivery="stream") as client:
        return [each.numpy() for each in client.encode(wanted, **options)]


@both
@pytest.mark.parametrize("options", [{}, {"output_type": "bfloat16"}, {"output_type": "float16"}])
async def test_rows_are_those_of_the_stream(make: Call, options: dict[str, Any], server: ServerProcess) -> None:
    wanted = items(5)
    expected = plain(server, wanted, **options)
    before = delivered(server, "nixl"), delivered(server, "stream")
    async with make(server.target, delivery="nixl") as client:
        got = await client.encode(wanted, **options)
        nbytes = sum(each.torch().nbytes for each in got)
    for each, rows in zip(got, expected, strict=True):  # rows outlive their client
        np.testing.assert_array_equal(each.numpy(), rows)
        np.testing.assert_array_equal(np.asarray(each), rows)
        assert not each.report.delivery_fallback
    assert delivered(server, "nixl") - before[0] == nbytes
    assert delivered(server, "stream") == before[1]


@both
async def test_rows_of_uploads_in_chunks(make: Call, server: ServerProcess) -> None:
    wanted = items(3, side=16)
    before = delivered(server, "stream")
    async with make(server.target, delivery="nixl") as client:
        async with aclosing(client.iter_encode(wanted, return_exceptions=True)) as results:
            got = {index: each.numpy() async for index, each in results}
        assert delivered(server, "stream") == before
    for index, rows in enumerate(plain(server, wanted)):
        np.testing.assert_array_equal(got[index], rows)


@both
async def test_pruned_and_cached_rows(make: Call, server: ServerProcess) -> None:
    frames = np.random.default_rng(3).standard_normal((4 * 8 * 8, COLUMNS), dtype=np.float32)
    clip = Item(frames, (4, 8, 8), modality="video", keep_ratio=0.5, content_id="a clip")
    async with make(server.target, delivery="nixl") as client:
        before = delivered(server, "stream")
        (first,) = await client.encode([clip])
        (second,) = await client.encode_cached([clip])
        assert delivered(server, "stream") == before
    assert second.report.path == "cache"
    assert first.shape[0] == 32
    np.testing.assert_array_equal(first.numpy(), second.numpy())


def test_auto_uses_responses_for_host_memory(server: ServerProcess) -> None:
    with Client(server.target) as client:
        assert client.model().deliveries == ("stream", "nixl")
        before = delivered(server, "nixl")
        client.encode(items(2))
        assert delivered(server, "nixl") == before


@pytest.mark.matrix
def test_without_the_flag_auto_uses_responses(checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    with serving(checkpoints("qwen2_vl"), "--graphs", "off", *PIXELS_ONLY) as plain_server:
        with Client(plain_server.target, device="cuda:0") as client, caplog.at_level(logging.INFO, "vitwire"):
            assert client.model().deliveries == ("stream",)
            for _ in range(3):
                client.encode(items(1))
        assert [record.getMessage().count("NIXL") for record in caplog.records].count(1) == 1
        with Client(plain_server.target, delivery="nixl") as client, pytest.raises(EncodeFailed, match="--nixl"):
            client.encode(items(1))


@both
async def test_a_client_without_room_waits(make: Call, server: ServerProcess) -> None:
    async with make(server.target, delivery="nixl", delivery_bytes=8192) as client:
        held = await client.encode(items(2))
        view = held[0].numpy()[3:]
        waiting = asyncio.create_task(client.encode(items(1, seed=5), timeout=60))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        kept = view.copy()
        del held
        gc.collect()
        (embedding,) = await waiting
        np.testing.assert_array_equal(view, kept)  # a view keeps its memory
        np.testing.assert_array_equal(embedding.numpy(), plain(server, items(1, seed=5))[0])


def test_auto_takes_what_has_no_room_from_the_response(server: ServerProcess) -> None:
    wanted = items(4)
    before = delivered(server, "nixl"), delivered(server, "stream")
    with Client(server.target, delivery="nixl", delivery_bytes=8192) as client:
        client._shared.nixl.is_required = False  # as "auto" is for a device
        got = client.encode(wanted)
    for each, rows in zip(got, plain(server, wanted), strict=True):
        np.testing.assert_array_equal(each.numpy(), rows)
    assert delivered(server, "nixl") - before[0] == got[0].torch().nbytes * 2
    assert delivered(server, "stream") > before[1]


async def test_cancelled_calls_leave_memory_that_is_not_used_again(server: ServerProcess) -> None:
    expected = plain(server, items(1, side=32))[0]
    async with AsyncClient(server.target, delivery="nixl", delivery_bytes=1 << 20) as client:
        await client.encode(items(1))
        pool = client._shared.nixl._pool
        for _ in range(40):
            call = asyncio.create_task(client.encode(items(1, side=32)))
            await asyncio.sleep(0.01)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        assert pool
        assert pool.abandoned, "calls were cancelled in flight"
        for _ in range(3):
            (embedding,) = await client.encode(items(1, side=32))
            np.testing.assert_array_equal(embedding.numpy(), expected)


# -- raw requests ----------------------------------------------------------------------------------


def leased(**changed: Any) -> pb.EncodeRequest:
    """A request of a region in memory that nobody registered."""
    made = request(image(4, 4))
    metadata = b"nixlSerDes|Agent" + (5).to_bytes(8, "little") + b"alice|Conns"
    fields = {
        "agent": "alice",
        "agent_metadata": metadata,
        "memory": pb.MEMORY_KIND_HOST,
        "address": 4096,
        "bytes": 8192,
    }
    made.delivery.CopyFrom(pb.Delivery(**(fields | changed)))
    made.items[0].region.CopyFrom(pb.Region(offset=0, bytes=4096))
    return made


def test_wrong_deliveries_are_refused_by_field(server: ServerProcess) -> None:
    outside, small, alone = leased(), leased(), leased()
    outside.items[0].region.offset = (1 << 64) - 1
    small.items[0].region.bytes = 3
    alone.ClearField("delivery")
    wrong = {
        "items[0].region: 4096 bytes at": outside,
        "items[0].region: has 3 bytes": small,
        "items[0].region: needs a delivery": alone,
        "delivery.agent: its metadata": leased(agent="bob"),
        "delivery.memory: must be": leased(memory=7),
        "delivery.address: 8192 bytes": leased(address=(1 << 64) - 1),
    }
    with grpc.insecure_channel(server.target) as channel:
        for reason, message in wrong.items():
            with pytest.raises(grpc.RpcError) as caught:
                list(EncoderServiceStub(channel).Encode(message, timeout=60))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert reason in caught.value.details()


def test_regions_that_overlap_are_refused(server: ServerProcess) -> None:
    """In one request, in one stream, and in requests at the same time."""
    two = leased()
    two.items.append(two.items[0])
    two.items[1].region.CopyFrom(pb.Region(offset=4095, bytes=4096))
    first = leased()
    options = pb.EncodeStreamOptions(delivery=first.delivery)
    begun = threading.Event()

    def messages() -> Iterator[pb.EncodeStreamRequest]:
        yield pb.EncodeStreamRequest(options=options)
        for number in range(2):
            yield header(number, first.items[0])[0]
        assert begun.wait(60)

    with grpc.insecure_channel(server.target) as channel:
        stub = EncoderServiceStub(channel)
        with pytest.raises(grpc.RpcError, match=r"items\[1\].region: overlaps") as caught:
            list(stub.Encode(two, timeout=60))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        stream = stub.EncodeStream(messages(), timeout=60)
        answer = next(iter(stream))
        assert (answer.item, answer.error.code) == (1, grpc.StatusCode.INVALID_ARGUMENT.value[0])
        with pytest.raises(grpc.RpcError, match=r"items\[0\].region: overlaps"):
            list(stub.Encode(first, timeout=60))
        stream.cancel()
        begun.set()
        deadline = time.monotonic() + 60
        while True:  # until the stream's end has reached the server
            try:
                list(stub.Encode(first, timeout=60))
                break
            except grpc.RpcError:
                assert time.monotonic() < deadline


def test_agents_that_cannot_be_loaded_get_their_rows_in_the_response(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.target) as channel:
        responses = list(EncoderServiceStub(channel).Encode(leased(), timeout=60))
    assert responses[-1].chunk.last
    assert responses[-1].report.delivery_fallback == "refused"
