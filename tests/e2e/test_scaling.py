"""Several replicas: clients find new ones, share requests between them, and send equal content to the same one."""

import asyncio
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import pytest

import both_clients
import load
from checkpoints import Checkpoints
from nameserver import answering
from proxies import documented, envoy
from servers import PIXELS_ONLY, ServerProcess, serving
from vitwire import AsyncClient, Client, Item
from vitwire.v1 import encoder_pb2 as pb
from vitwire.v1.encoder_pb2_grpc import EncoderServiceStub

Pair = tuple[ServerProcess, ServerProcess]
COLUMNS = 3 * 2 * 14 * 14
SIMULATED = ("--graphs", "simulated", "--budgets", "64")
FLAGS = ("--max-connection-age-seconds", "1", "--cache-bytes", "10000000", *SIMULATED, *PIXELS_ONLY)


@pytest.fixture(scope="module")
def replicas(checkpoints: Checkpoints) -> Iterator[Pair]:
    """Two servers on one port of two addresses."""
    model = checkpoints("qwen2_vl")
    with (
        serving(model, *FLAGS) as first,
        serving(model, *FLAGS, "--host", "127.0.0.2", "--port", str(first.port)) as second,
    ):
        yield first, second


def item(rows: int = 16, content_id: str | None = None) -> Item:
    """With other pixels for each content id, also once they are bfloat16, as the cache knows equal pixels too."""
    pixels = np.random.default_rng(zlib.crc32((content_id or "").encode())).standard_normal((rows, COLUMNS))
    return Item(pixels.astype(np.float32), (1, rows // 2, 2), content_id=content_id)


def both(replicas: Pair) -> str:
    first, second = replicas
    return f"ipv4:127.0.0.1:{first.port},127.0.0.2:{second.port}"


def counts(replicas: Pair, name: str) -> list[float]:
    return [replica.metric(name) for replica in replicas]


@pytest.mark.parametrize("rows", [16, 1024], ids=["Encode", "EncodeStream"])
def test_a_running_client_reaches_a_new_replica(replicas: Pair, rows: int) -> None:
    first, second = replicas
    with answering("127.0.0.1") as names, Client(names.target(first.port), timeout=60) as client:
        before = second.metric("vitwire_items_total")
        for _ in range(3):
            client.encode([item(rows)])
        assert second.metric("vitwire_items_total") == before
        names.addresses = ("127.0.0.1", "127.0.0.2")
        deadline = time.monotonic() + 60
        while second.metric("vitwire_items_total") == before:
            assert time.monotonic() < deadline, f"no request came, after {names.asked} queries for addresses"
            client.encode([item(rows)])


def test_a_stream_outlives_the_age_of_its_connection(replicas: Pair) -> None:
    first, _ = replicas
    header, data = load.header(0, load.image(8, 8))
    half, aged = len(data) // 2, threading.Event()

    def upload() -> Iterator[pb.EncodeStreamRequest]:
        yield header
        yield load.chunk(0, data[:half])
        aged.wait(60)
        yield load.chunk(0, data[half:])

    with grpc.insecure_channel(first.target) as channel:
        states: list[grpc.ChannelConnectivity] = []

        def watch(state: grpc.ChannelConnectivity) -> None:
            states.append(state)
            if grpc.ChannelConnectivity.READY in states and state is grpc.ChannelConnectivity.IDLE:
                aged.set()

        channel.subscribe(watch)
        answers = list(EncoderServiceStub(channel).EncodeStream(upload(), timeout=100))
    assert aged.is_set(), f"the connection was not renewed: {states}"
    assert answers[-1].chunk.last


async def test_no_request_fails_when_connections_are_renewed(replicas: Pair) -> None:
    """Without any retry."""
    first, _ = replicas
    stop = asyncio.Event()
    loading = asyncio.create_task(load.closed(first.target, load.request(load.image(8, 8)), workers=8, stop=stop))
    await asyncio.sleep(3)
    stop.set()
    assert set((await loading).codes) == {"OK"}


def encode_repeatedly(client: Client, names: list[str]) -> None:
    for _ in range(3):
        for name in names:
            client.encode([item(content_id=name)])


@pytest.mark.parametrize("way", ["affinity", "RING_HASH", pytest.param("MAGLEV", marks=pytest.mark.matrix)])
def test_equal_content_goes_to_the_same_replica(replicas: Pair, way: str, tmp_path: Path) -> None:
    """By the client's own ring, or by a proxy that hashes the hint: each content id is encoded once, in one replica."""
    names = [f"{way}-{number}" for number in range(16)]
    with ExitStack() as stack:
        target = both(replicas)
        if way != "affinity":
            ports = [("127.0.0.1", replicas[0].port), ("127.0.0.2", replicas[1].port)]
            front = stack.enter_context(envoy(documented(ports, way), tmp_path))
            asyncio.run(asyncio.wait_for(front.wait_for(2), 30))
            target = front.target
        encoded, hits = counts(replicas, "vitwire_cache_misses_total"), counts(replicas, "vitwire_cache_hits_total")
        with Client(target, affinity=way == "affinity", timeout=60) as client:
            encode_repeatedly(client, names)
        misses = np.subtract(counts(replicas, "vitwire_cache_misses_total"), encoded)
        assert misses.sum() == 16
        assert misses.all(), "one replica has all content"
        assert sum(counts(replicas, "vitwire_cache_hits_total")) - sum(hits) == 32
        # Other clients find it in the same place, by the ring also in one request of many content ids. Envoy would send
        # some of simultaneous RPCs elsewhere, as it bounds the load of a replica.
        requests = [names] if way == "affinity" else [[name] for name in names]
        with Client(target, affinity=True, timeout=60) as client:
            rows = [client.encode_cached([item(content_id=name) for name in each]) for each in requests]
        assert {each.report.path for found in rows for each in found} == {"cache"}
        assert counts(replicas, "vitwire_cache_misses_total") == list(np.add(encoded, misses))


async def test_asynchronous_calls_have_the_same_affinity(replicas: Pair) -> None:
    names = [f"async-{number}" for number in range(8)]
    with Client(both(replicas), affinity=True, timeout=60) as client:
        client.encode([item(content_id=name) for name in names])
    async with AsyncClient(both(replicas), affinity=True, timeout=60) as client:
        rows = await client.encode([Item(None, (1, 8, 2), content_id=name) for name in names])
        large = await client.encode([item(1024, content_id="async-large")])
        again = await client.encode([Item(None, (1, 512, 2), content_id="async-large")])
    assert {each.report.path for each in (*rows, *again)} == {"cache"}
    np.testing.assert_array_equal(large[0].numpy(), again[0].numpy())


@both_clients.both
async def test_a_request_is_split_where_that_pays(replicas: Pair, make: both_clients.Call) -> None:
    """More tokens than the largest budget, and two replicas that the client has met."""
    calls = partial(counts, replicas, "vitwire_requests_total")
    async with make(both(replicas), spread="auto", timeout=60) as client:
        before, deadline = calls(), time.monotonic() + 60
        while any(after <= then + 1 for after, then in zip(calls(), before, strict=True)):
            assert time.monotonic() < deadline
            await client.encode([item()])
        total = sum(calls())
        await client.encode([item(64), item(64)])
        assert sum(calls()) - total == 1
        await client.encode([item(64)] * 8)
        assert sum(calls()) - total == 3


@pytest.mark.matrix
@pytest.mark.parametrize("affinity", [False, True])
async def test_replicas_come_and_go_under_load(checkpoints: Checkpoints, affinity: bool) -> None:
    """A running client follows the name: no call fails, and what is gone gets none."""
    model, done, stop = checkpoints("qwen2_vl"), 0, asyncio.Event()
    flags = (*FLAGS, "--lame-duck-seconds", "3")

    async def load_until(stop: asyncio.Event, client: AsyncClient) -> None:
        nonlocal done
        while not stop.is_set():
            await client.encode([item(content_id=str(done % 50))])
            done += 1

    async def takes_part(server: ServerProcess) -> None:
        before, deadline = server.metric("vitwire_items_total"), time.monotonic() + 60
        while server.metric("vitwire_items_total") < before + 10:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)

    with answering("127.0.0.1") as names, serving(model, *flags) as first:
        async with AsyncClient(names.target(first.port), affinity=affinity, timeout=60) as client:
            loading = [asyncio.create_task(load_until(stop, client)) for _ in range(4)]
            await takes_part(first)
            with serving(model, *flags, "--host", "127.0.0.2", "--port", str(first.port)) as second:
                names.addresses = ("127.0.0.1", "127.0.0.2")
                await takes_part(second)
                names.addresses = ("127.0.0.2",)
                assert await asyncio.to_thread(first.stop) == 0
                await takes_part(second)
                with serving(model, *flags, "--port", str(first.port)) as returned:
                    names.addresses = ("127.0.0.1", "127.0.0.2")
                    await takes_part(returned)
                    stop.set()
                    await asyncio.gather(*loading)
    assert done
