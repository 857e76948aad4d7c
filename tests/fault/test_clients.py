"""Clients in bulk that expire, cancel, stall or die; nothing they held stays."""

import asyncio
import random
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import grpc.aio
import pytest

import load
from checkpoints import Checkpoints
from faults import FAULTY, Note, bounded_queue, rss_mib, scaled, settle
from load import UNLIMITED, Tally, image, request
from servers import ServerProcess, serving
from vitwire.v1 import encoder_pb2 as pb
from vitwire.v1.encoder_pb2_grpc import EncoderServiceStub

pytestmark = pytest.mark.timeout(900)


async def one_is_served(server: ServerProcess) -> None:
    assert (await load.closed(server.target, request(image()), workers=1, calls=1)).codes == {"OK": 1}


async def test_deadlines_of_a_millisecond_in_bulk(server: ServerProcess, note: Note) -> None:
    ran, tally, count = server.metric("vitwire_batch_items_sum"), Tally(), scaled(20_000, 500)
    async with grpc.aio.insecure_channel(server.target, UNLIMITED) as channel:
        stub = EncoderServiceStub(channel)
        for _ in range(count // 50):
            calls = (load.call(stub, request(image(), image(16, 16)), tally, timeout=0.001) for _ in range(50))
            await asyncio.gather(*calls)
    # gRPC reports CANCELLED for a stream that the server's clock ended before the client's did.
    assert set(tally.codes) <= {"DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "CANCELLED"}
    settle(server)
    computed = server.metric("vitwire_batch_items_sum") - ran
    note(calls=count, codes=tally.codes, items_computed=computed)
    assert computed == 0, "no device time for what cannot be in time"
    await one_is_served(server)


async def test_a_storm_of_cancellations(server: ServerProcess, note: Note) -> None:
    rng, count = random.Random(1), scaled(10_000, 300)

    async def flighty(stub: EncoderServiceStub) -> None:
        running = stub.Encode(request(*[image(8, 8)] * rng.randint(1, 4)))
        await asyncio.sleep(rng.expovariate(1 / 0.01))
        running.cancel()

    with bounded_queue(server, 64, 64 << 20):
        async with grpc.aio.insecure_channel(server.target, UNLIMITED) as channel:
            stub = EncoderServiceStub(channel)
            for _ in range(count // 50):
                await asyncio.gather(*(flighty(stub) for _ in range(50)))
        settle(server, on_the_device=4)
    stages = {stage: server.metric("vitwire_cancelled_total", stage=stage) for stage in ("queue", "encoded", "send")}
    made, closed = (server.metric(f"vitwire_tickets_{what}_total") for what in ("opened", "closed"))
    note(calls=count, tickets_made=made, tickets_released=closed, items_cancelled=stages)
    await one_is_served(server)


async def test_equal_items_cancelled_in_bulk(checkpoints: Checkpoints, tmp_path: Path, note: Note) -> None:
    """With a cache, equal items wait for one forward; when their request is over, none of them may run."""
    fault, bounds, count, rng = tmp_path / "fault", (512, 32 << 20), scaled(300, 12), random.Random(2)
    fault.write_text("slow 0.5")
    queue = ("--max-queued-items", str(bounds[0]), "--max-queued-bytes", str(bounds[1]), "--cache-bytes", "100000")
    flags = (*queue, "--max-items-per-batch", "4", "--canary-seconds", "0")

    async def flighty(stub: EncoderServiceStub, level: int) -> None:
        running = stub.Encode(request(*[image(level=level)] * 100))
        await asyncio.sleep(rng.uniform(0.05, 0.6))
        running.cancel()

    with serving(checkpoints("qwen2_vl"), *flags, program=(FAULTY, str(fault))) as server:
        with bounded_queue(server, *bounds):
            async with grpc.aio.insecure_channel(server.target, UNLIMITED) as channel:
                stub = EncoderServiceStub(channel)
                for start in range(0, count, 4):
                    await asyncio.gather(*(flighty(stub, (start + each) % 256) for each in range(4)))
                await one_is_served(server)
        await asyncio.to_thread(settle, server, on_the_device=4)
        undelivered, stopped = (server.metric("vitwire_cancelled_total", stage=each) for each in ("encoded", "queue"))
        note(calls=count, items=100 * count, undelivered=undelivered, left_the_queue=stopped)


def test_clients_that_stall(checkpoints: Checkpoints, note: Note) -> None:
    """Readers that do not read 200 MB each, and uploaders that do not send, on connections of their own."""
    count, named = scaled(40, 4), image(64, 64)
    named.content_id = "large"
    asks = [pb.Item(content_id="large")] * 256
    apart = (*UNLIMITED, ("grpc.use_local_subchannel_pool", 1))

    def stalls() -> Iterator[pb.EncodeStreamRequest]:
        yield load.header(1, image(64, 64, level=1))[0]
        time.sleep(15)

    flags = ("--cache-bytes", "8000000", "--idle-seconds", "3", "--max-queued-bytes", str(64 << 30))
    with serving(checkpoints("qwen2_vl"), *flags, "--max-queued-items", "100000") as server, ExitStack() as stack:
        channels = [stack.enter_context(grpc.insecure_channel(server.target, apart)) for _ in range(count)]
        stubs = [EncoderServiceStub(channel) for channel in channels]
        list(stubs[0].Encode(pb.EncodeRequest(items=[named], output_type=pb.DATA_TYPE_FLOAT32)))
        before = peak = rss_mib(server)
        readers = [stub.Encode(pb.EncodeRequest(items=asks, output_type=pb.DATA_TYPE_FLOAT32)) for stub in stubs]
        uploaders = [stub.EncodeStream(stalls()) for stub in stubs]
        while server.metric("vitwire_requests_total", code="DEADLINE_EXCEEDED") < 2 * count:
            peak = max(peak, rss_mib(server))
            time.sleep(0.1)
        settle(server)
        codes = {"readers": Counter(map(code_of, readers)), "uploaders": Counter(map(code_of, uploaders))}
        note(stalled=2 * count, codes=codes, rss_before=before, rss_peak=peak)
        assert set(codes["uploaders"]) == {"DEADLINE_EXCEEDED"}
        assert "OK" not in codes["readers"]
        assert peak - before < 16 * count + 64, "a message and a window for each"
        asyncio.run(one_is_served(server))


def code_of(call: Iterator[object]) -> str:
    """How a call ended, with what it was sent before that."""
    try:
        deque(call, maxlen=0)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def test_clients_killed_mid_stream(server: ServerProcess, note: Note) -> None:
    kills = scaled(40, 3)
    for _ in range(kills):
        client = subprocess.Popen([sys.executable, Path(load.__file__), server.target], stdout=subprocess.PIPE)
        assert client.stdout
        assert client.stdout.readline() == b"0\n"
        client.kill()
        client.wait()
        client.stdout.close()
    settle(server)
    note(kills=kills, cancelled=server.metric("vitwire_requests_total", code="CANCELLED"))
    asyncio.run(one_is_served(server))


def test_bodies_wait_outside_until_they_fit(checkpoints: Checkpoints, note: Note) -> None:
    """Thirty callers send one-message requests without pause: memory stays the same, however many they send."""
    mib, callers, count, size = 1 << 20, 30, scaled(300, 90), 30 << 20
    bounds = ("--max-request-bytes", str(32 * mib), "--max-queued-bytes", str(128 * mib), "--idle-seconds", "60")
    body = b"\x7a" + varint(size) + bytes(size)  # field 15 of an EncodeRequest, which has none
    apart = (*UNLIMITED, ("grpc.use_local_subchannel_pool", 1))

    def pour(_: int) -> Counter[str]:
        with grpc.insecure_channel(server.target, apart) as channel:
            encode = channel.unary_stream("/vitwire.v1.EncoderService/Encode")
            return Counter(code_of(encode(body)) for _ in range(count // callers))

    with serving(checkpoints("qwen2_vl"), *bounds) as server, ThreadPoolExecutor(callers) as pool:
        before = peak = rss_mib(server)
        pouring = [pool.submit(pour, caller) for caller in range(callers)]
        while not all(each.done() for each in pouring):
            peak = max(peak, rss_mib(server))
            time.sleep(0.02)
        codes = sum((each.result() for each in pouring), Counter[str]())
        note(bodies=count, body_mib=size // mib, codes=codes, rss_before=before, rss_peak=peak)
        assert set(codes) <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
        assert peak - before < 4 * 5 * 32 + callers * 20, "four places, with copies, and what is sent ahead of a place"


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
