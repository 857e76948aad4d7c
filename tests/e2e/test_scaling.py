"""Replicas that come later: running clients find them, and lose nothing when their connections are renewed."""

import asyncio
import threading
import time
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

import load
from checkpoints import Checkpoints
from nameserver import answering
from servers import ServerProcess, serving
from vitwire import Client, Item
from vitwire.v1 import encoder_pb2 as pb
from vitwire.v1.encoder_pb2_grpc import EncoderServiceStub

COLUMNS = 3 * 2 * 14 * 14
AGE = ("--max-connection-age-seconds", "1")


@pytest.fixture(scope="module")
def replicas(checkpoints: Checkpoints) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """Two servers on one port of two addresses."""
    model = checkpoints("qwen2_vl")
    with (
        serving(model, *AGE) as first,
        serving(model, *AGE, "--host", "127.0.0.2", "--port", str(first.port)) as second,
    ):
        yield first, second


def item(rows: int = 16) -> Item:
    return Item(np.ones((rows, COLUMNS), np.float32), (1, rows // 2, 2))


@pytest.mark.parametrize("rows", [16, 1024], ids=["Encode", "EncodeStream"])
def test_a_running_client_reaches_a_new_replica(replicas: tuple[ServerProcess, ServerProcess], rows: int) -> None:
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


def test_a_stream_outlives_the_age_of_its_connection(replicas: tuple[ServerProcess, ServerProcess]) -> None:
    first, _ = replicas
    whole = load.image(8, 8)
    half, aged = len(whole.pixels.data) // 2, threading.Event()

    def upload() -> Iterator[pb.EncodeStreamRequest]:
        header = pb.Item(modality=whole.modality, grid=whole.grid)
        header.pixels.data_type = whole.pixels.data_type
        header.pixels.shape.extend(whole.pixels.shape)
        yield pb.EncodeStreamRequest(header=pb.EncodeStreamHeader(item=0, header=header))
        yield pb.EncodeStreamRequest(chunk=pb.EncodeStreamChunk(item=0, data=whole.pixels.data[:half]))
        aged.wait(60)
        yield pb.EncodeStreamRequest(chunk=pb.EncodeStreamChunk(item=0, data=whole.pixels.data[half:]))

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


async def test_no_request_fails_when_connections_are_renewed(replicas: tuple[ServerProcess, ServerProcess]) -> None:
    """Without any retry."""
    first, _ = replicas
    stop = asyncio.Event()
    loading = asyncio.create_task(load.closed(first.target, load.request(load.image(8, 8)), workers=8, stop=stop))
    await asyncio.sleep(3)
    stop.set()
    assert set((await loading).codes) == {"OK"}
