"""Files, pictures and other items whose number of rows the client does not know, written into its memory by NIXL."""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image

from both_clients import Call, both
from checkpoints import Checkpoints
from encoded_files import saved
from entered import entered
from nixl_consumer import ConsumerProcess, consuming
from servers import ServerProcess, emptied, serving
from vitwire import AsyncClient, Client, EncodeFailed, InvalidItem, Item, VitwireError
from vitwire._delivery.nixl import Nixl
from vitwire.shared.agents import is_installed
from vitwire.v1 import encoder_pb2 as pb
from vitwire.v1.encoder_pb2_grpc import EncoderServiceStub
from waiting import until

pytestmark = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed")
COLUMNS = 3 * 2 * 16 * 16
FLAGS = ("--nixl", "--nixl-seconds", "60", "--graphs", "off", "--dtype", "float32", "--decode-processes", "1")
ROWS = 3 * 4096
"""Bytes of the rows of a small file."""
SHAPES = {
    "one process": ("--cache-bytes", "3000000"),
    "no cache": (),
    "edges, on the device": ("--rpc-processes", "2", "--prepare", "device", "--cache-bytes", "3000000"),
}


server = entered(
    lambda checkpoints, request: emptied(checkpoints("qwen3_vl"), *FLAGS, *SHAPES[request.param]),
    params=[each if "edges" in each else pytest.param(each, marks=pytest.mark.matrix) for each in SHAPES],
)
plain_server = entered(lambda checkpoints: serving(checkpoints("qwen3_vl"), *FLAGS, "--idle-seconds", "3"))


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)


def png(*size: int, seed: int = 0) -> bytes:
    return saved(Image.fromarray(picture(*size, seed)), "PNG")


def mixed() -> list[Item]:
    """Pixels, a file, pictures for the engine and for a decoder, a large upload, and a clip that is pruned."""
    pixels = np.random.default_rng(5).standard_normal((8 * 8, COLUMNS), dtype=np.float32)
    alpha = np.dstack([picture(96, 128, 2), np.full((96, 128), 200, np.uint8)])
    frames = np.stack([picture(64, 96, seed) for seed in range(4)])
    return [
        Item(pixels, (1, 8, 8)),
        Item(encoded=png(128, 160, seed=1)),
        Item(picture(160, 96, 3)),
        Item(alpha),
        Item(picture(1200, 1000, 4)),
        Item(frames, modality="video", keep_ratio=0.5),
    ]


def plain(server: ServerProcess, items: list[Item]) -> list[np.ndarray]:
    """The rows as the stream brings them."""
    with Client(server.target, delivery="stream") as client:
        return [each.numpy() for each in client.encode(items)]


def delivered(server: ServerProcess, way: str) -> float:
    return server.metric("vitwire_delivered_bytes_total", way=way)


def assert_returned(nixl: Nixl) -> None:
    """Nothing is leased any more, and nothing was abandoned."""
    pool = nixl._pool
    assert pool

    def is_free() -> bool:
        gc.collect()  # a thread may still hold the last result
        whole = pool.lease(pool.size)
        if whole:
            whole.release()
        return whole is not None

    until(is_free)
    assert (pool.abandoned, pool._unanswered) == (0, 0)


def assert_close(rows: Any, expected: np.ndarray) -> None:
    """Equal but for the rounding of batches with other neighbours."""
    np.testing.assert_allclose(np.asarray(rows), expected, rtol=0, atol=1e-5)


@both
async def test_rows_are_those_of_the_stream(make: Call, server: ServerProcess) -> None:
    items = mixed()
    expected = plain(server, items)
    before = delivered(server, "nixl"), delivered(server, "stream")
    async with make(server.target, delivery="nixl") as client:
        got = await client.encode(items)
        images = await client.encode_images([png(128, 160, seed=1), picture(160, 96, 3)])
        assert delivered(server, "nixl") - before[0] == sum(each.numpy().nbytes for each in [*got, *images])
        assert delivered(server, "stream") == before[1]
        for each, rows in zip([*got, *images], [*expected, *expected[1:3]], strict=True):
            assert_close(each.numpy(), rows)
            assert not each.report.delivery_fallback
            assert all(each.grid)
        shared = client.client._shared if hasattr(client, "client") else client._shared
        del got, images, each
        await asyncio.to_thread(assert_returned, shared.nixl)


@both
async def test_a_file_that_fails_leaves_the_others(make: Call, server: ServerProcess) -> None:
    good = mixed()
    items = [Item(encoded=png(64, 64)[:200]), *good[:2], Item(encoded=b"\xff\xd8\xff none"), *good[2:]]
    expected = plain(server, good)
    async with make(server.target, delivery="nixl") as client:
        before = delivered(server, "stream")
        async with aclosing(client.iter_encode(items, return_exceptions=True)) as results:
            got = {index: each async for index, each in results}
        assert delivered(server, "stream") == before
        assert isinstance(got.pop(0), InvalidItem)
        assert isinstance(got.pop(3), InvalidItem)
        for (_, each), rows in zip(sorted(got.items()), expected, strict=True):
            assert_close(each.numpy(), rows)
        shared = client.client._shared if hasattr(client, "client") else client._shared
        got.clear()
        del each
        await asyncio.to_thread(assert_returned, shared.nixl)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_tiles_of_which_the_grid_says_no_rows(processes: str, checkpoints: Checkpoints) -> None:
    """Reserved before their region is known, and written to it by the engine's process."""
    flags = (*FLAGS, "--rpc-processes", processes)
    with (
        serving(checkpoints("internvl_chat"), *flags) as server,
        Client(server.target, delivery="nixl") as client,
    ):
        model = client.model()
        assert model.tiles
        assert "image" not in model.rows_by_grid
        random = np.random.default_rng(1)
        tiles = [random.standard_normal((count, 3, *model.tiles.tile), dtype=np.float32) for count in (1, 3, 2)]
        items = [*(Item(each, (len(each), 1, 1)) for each in tiles), Item(encoded=png(100, 300))]
        expected = plain(server, items)
        before = delivered(server, "stream")
        for each, rows in zip(client.encode(items), expected, strict=True):
            assert_close(each.numpy(), rows)
        assert delivered(server, "stream") == before


def test_more_items_than_may_wait_for_their_regions(checkpoints: Checkpoints) -> None:
    flags = (*FLAGS, "--max-items-per-request", "2")
    with (
        serving(checkpoints("qwen3_vl"), *flags) as server,
        Client(server.target, delivery="nixl") as client,
    ):
        items = [Item(encoded=png(64, 64 + 32 * (seed % 3), seed=seed)) for seed in range(24)]
        expected = plain(server, items)
        before = delivered(server, "stream")
        for index, each in client.iter_encode(items):
            assert_close(each.numpy(), expected[index])
        assert delivered(server, "stream") == before


@pytest.mark.parametrize("kind", ["file", "pixels"])
def test_memory_is_reused_and_never_overrun(kind: str, server: ServerProcess) -> None:
    """The pool holds two embeddings at a time, leased late or, for pixels, before they are sent."""
    files = [Item(encoded=png(64, 64, seed=seed)) for seed in range(6)]
    values = np.random.default_rng(6).standard_normal((12, 16, COLUMNS), dtype=np.float32)
    items = files if kind == "file" else [Item(each, (1, 4, 4)) for each in values]
    expected = plain(server, items)
    before = delivered(server, "stream")
    with Client(server.target, delivery="nixl", delivery_bytes=2 * ROWS) as client:
        for item, rows in zip(items, expected, strict=True):
            (embedding,) = client.encode([item])
            assert_close(embedding.numpy(), rows)
            del embedding
        assert delivered(server, "stream") == before
        with pytest.raises(EncodeFailed, match=f"delivery_bytes is {2 * ROWS}"):
            client.encode(items[:3] if kind == "file" else items)


@both
async def test_without_room_an_item_waits(make: Call, server: ServerProcess) -> None:
    file = png(64, 64)
    async with make(server.target, delivery="nixl", delivery_bytes=ROWS) as client:
        held = await client.encode([Item(encoded=file)])
        before = delivered(server, "stream")
        waiting = asyncio.create_task(client.encode([Item(encoded=file)], timeout=60))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        kept = held[0].numpy().copy()
        del held
        gc.collect()
        (embedding,) = await waiting
        assert_close(embedding.numpy(), kept)
        assert delivered(server, "stream") == before


def test_what_finds_no_room_comes_in_the_response(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitwire._delivery.nixl._ROOM_SECONDS", 0.2)
    item = Item(encoded=png(64, 64))
    (rows,) = plain(server, [item])
    for required in (True, False):
        with Client(server.target, delivery="nixl", delivery_bytes=ROWS) as client:
            (held,) = client.encode([item])
            client._shared.nixl.is_required = required  # else as "auto" is for a device
            before = delivered(server, "stream")
            (embedding,) = client.encode([item])
            assert delivered(server, "stream") > before
            assert_close(embedding.numpy(), rows)
            assert not embedding.report.delivery_fallback
            del held
            assert_returned(client._shared.nixl)
            before = delivered(server, "stream")
            client.encode([item])
            assert delivered(server, "stream") == before, "NIXL is not paused"


async def test_cancelled_calls_leave_memory_that_is_not_used_again(server: ServerProcess) -> None:
    item = Item(encoded=png(512, 512))
    (rows,) = plain(server, [item])
    async with AsyncClient(server.target, delivery="nixl") as client:
        await client.encode([item])
        pool = client._shared.nixl._pool
        assert pool
        for turn in range(30):
            call = asyncio.create_task(client.encode([item, Item(picture(64, 64))]))
            await asyncio.sleep(0.004 * turn)
            call.cancel()
            with suppress(asyncio.CancelledError):
                await call
        until(lambda: pool._unanswered == 0)
        for _ in range(3):
            (embedding,) = await client.encode([item])
            assert_close(embedding.numpy(), rows)


@both
async def test_no_lease_outlives_a_call_whose_deadline_passes_before_it_starts(
    make: Call, plain_server: ServerProcess
) -> None:
    """Else the pool would lose memory that does not count as abandoned, so that it is never replaced."""
    item = mixed()[0]
    async with make(plain_server.target, delivery="nixl", delivery_bytes=8 * ROWS) as client:
        await client.encode([item])
        nixl = (client.client if hasattr(client, "client") else client)._shared.nixl
        pools = {nixl._pool}
        for microseconds in range(0, 1000, 10):
            with suppress(VitwireError):
                await client.encode([item], timeout=1e-6 * (1 + microseconds))
            pools.add(nixl._pool)
        for pool in pools - {None}:
            until(lambda pool=pool: pool._unanswered == 0)


# -- raw requests ----------------------------------------------------------------------------------

consumer = entered(lambda: consuming(16 * ROWS), scope="function")


def delivery(process: ConsumerProcess) -> pb.EncodeStreamRequest:
    memory = pb.Delivery(
        agent=process.agent,
        agent_metadata=process.metadata,
        memory=pb.MEMORY_KIND_HOST,
        address=process.address,
        bytes=process.nbytes,
    )
    return pb.EncodeStreamRequest(options=pb.EncodeStreamOptions(delivery=memory))


def opened(number: int, file: bytes, **changed: Any) -> list[pb.EncodeStreamRequest]:
    """Header and bytes of a file whose region follows."""
    header = pb.Item(modality=pb.MODALITY_IMAGE, **changed)
    return [
        pb.EncodeStreamRequest(
            header=pb.EncodeStreamHeader(item=number, header=header, encoded_bytes=len(file), region_follows=True)
        ),
        pb.EncodeStreamRequest(chunk=pb.EncodeStreamChunk(item=number, data=file)),
    ]


def region(number: int, offset: int | None = None, nbytes: int = ROWS) -> pb.EncodeStreamRequest:
    leased = None if offset is None else pb.Region(offset=offset, bytes=nbytes)
    return pb.EncodeStreamRequest(region=pb.EncodeStreamRegion(item=number, region=leased))


def answers(server: ServerProcess, messages: list[pb.EncodeStreamRequest], *, hold: bool = False) -> list[Any]:
    """All responses; `hold` sends the end of the stream only after the last item was answered."""

    with grpc.insecure_channel(server.target) as channel:
        items = sum(message.HasField("header") for message in messages)
        answered: list[int] = []

        def sent() -> Iterator[pb.EncodeStreamRequest]:
            yield from messages
            if hold:
                until(lambda: len(answered) == items)

        got = []
        for response in EncoderServiceStub(channel).EncodeStream(sent(), timeout=60):
            got.append(response)
            if not response.HasField("accepted"):
                answered.append(response.item)
        return got


def kinds(responses: list[Any], number: int = 0) -> list[str]:
    return [each.WhichOneof("result") for each in responses if each.item == number]


def test_a_region_follows(plain_server: ServerProcess, consumer: ConsumerProcess) -> None:
    file = png(64, 64)
    got = answers(plain_server, [delivery(consumer), *opened(0, file), region(0, 4 * ROWS)])
    assert kinds(got) == ["accepted", "placement"]
    assert got[0].accepted.tokens == got[1].placement.shape[0]
    assert got[1].placement.offset == 4 * ROWS
    nbytes = got[1].placement.bytes
    assert consumer.sums(0, 4 * ROWS) == {"0": 4 * ROWS}
    assert consumer.sums(4 * ROWS, nbytes) != {"0": nbytes}
    assert nbytes == ROWS
    assert consumer.sums(5 * ROWS, ROWS) == {"0": ROWS}


@pytest.mark.parametrize("hold", [False, True])
def test_without_a_region_rows_come_in_the_response(
    plain_server: ServerProcess, consumer: ConsumerProcess, hold: bool
) -> None:
    """The client says so, ends its stream, or says nothing for longer than the server waits."""
    said = answers(plain_server, [delivery(consumer), *opened(0, png(64, 64)), region(0)], hold=hold)
    silent = answers(plain_server, [delivery(consumer), *opened(0, png(64, 64))], hold=hold)
    for got in (said, silent):
        assert kinds(got) == ["accepted", "chunk"]
        assert not got[-1].report.delivery_fallback


def test_the_wait_for_a_region_is_not_time_of_a_decoder(plain_server: ServerProcess, consumer: ConsumerProcess) -> None:
    before, start = plain_server.metric("vitwire_decode_seconds_sum"), time.monotonic()
    got = answers(plain_server, [delivery(consumer), *opened(0, png(64, 64))], hold=True)
    assert kinds(got) == ["accepted", "chunk"]
    took = plain_server.metric("vitwire_decode_seconds_sum") - before
    assert took < time.monotonic() - start - 2.9, "the server waits for 3 s"


def test_wrong_regions_fail_their_item(plain_server: ServerProcess, consumer: ConsumerProcess) -> None:
    file = png(64, 64)
    wrong = {
        "are not within": region(0, 16 * ROWS),
        "the rows have": region(0, 0, 3),
        "overlaps": region(0, ROWS + 5),
    }
    for reason, message in wrong.items():
        got = answers(
            plain_server,
            [delivery(consumer), *opened(1, file), region(1, ROWS), *opened(0, file), message],
        )
        if reason == "overlaps":  # whichever of them is prepared first has it
            assert sorted(kinds(got, 0) + kinds(got, 1)) == ["accepted", "accepted", "error", "placement"]
        else:
            assert kinds(got, 0) == ["accepted", "error"]
            assert kinds(got, 1) == ["accepted", "placement"]
        (error,) = [each.error for each in got if each.HasField("error")]
        assert "region" in error.message
        assert reason in error.message


def test_wrong_headers_and_numbers(plain_server: ServerProcess, consumer: ConsumerProcess) -> None:
    file, area = png(64, 64), pb.Region(offset=0, bytes=ROWS)
    for messages, reason in (
        (opened(0, file), "needs a delivery"),
        ([delivery(consumer), *opened(0, file, region=area)], "an item with a region"),
        ([delivery(consumer), *opened(0, file, content_id="a", store_only=True)], "only stored"),
        ([delivery(consumer), *opened(0, b"", content_id="a")[:1]], "without content"),
    ):
        (got,) = answers(plain_server, messages)
        assert reason in got.error.message
    answered = answers(plain_server, [delivery(consumer), *opened(0, b"not a file"), region(0, 0)])
    assert kinds(answered)[-1] == "error"
    header, chunk = opened(0, file)
    header.header.region_follows = False
    with pytest.raises(grpc.RpcError, match="did not announce a region"):
        answers(plain_server, [delivery(consumer), header, region(0, 0), chunk])


@contextmanager
def awaiting(server: ServerProcess, consumer: ConsumerProcess, timeout: float) -> Iterator[Any]:
    """The stream of a file that was accepted, and whose region does not come."""
    over = threading.Event()

    def sent() -> Iterator[pb.EncodeStreamRequest]:
        yield from (delivery(consumer), *opened(0, png(64, 64)))
        over.wait(60)

    with grpc.insecure_channel(server.target) as channel:
        stream = EncoderServiceStub(channel).EncodeStream(sent(), timeout=timeout)
        assert next(stream).WhichOneof("result") == "accepted"
        yield stream
        over.set()


def test_a_deadline_passes_while_a_region_is_awaited(server: ServerProcess, consumer: ConsumerProcess) -> None:
    """The item holds nothing that others wait for, and leaves nothing behind."""
    before = server.metric("vitwire_tickets_opened_total") - server.metric("vitwire_tickets_closed_total")
    with awaiting(server, consumer, timeout=5) as stream, Client(server.target) as other:
        assert len(other.encode([Item(encoded=png(64, 64, seed=1))])) == 1
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: server.metric("vitwire_admitted_items") == 0)
    until(lambda: server.metric("vitwire_admitted_bytes") == 0)
    until(
        lambda: server.metric("vitwire_tickets_opened_total") - server.metric("vitwire_tickets_closed_total") == before
    )


def test_a_server_drains_while_a_region_is_awaited(checkpoints: Checkpoints, consumer: ConsumerProcess) -> None:
    with serving(checkpoints("qwen3_vl"), *FLAGS, "--drain-seconds", "1") as server:
        with awaiting(server, consumer, timeout=60) as stream:
            server.process.terminate()
            with pytest.raises(grpc.RpcError) as caught:
                next(stream)
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert server.process.wait(60) == 0
