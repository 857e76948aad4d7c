"""Rows that wait on the engine's device for a consumer, through real requests and NIXL. Here the device is the CPU."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
import torch

from checkpoints import Checkpoints
from entered import entered
from reference import Array, Reference
from servers import PIXELS_ONLY, ServerProcess, emptied, serving
from vitwire import Accepted, Client, DeadlineExceeded, Item, NotCached, Stored
from vitwire.shared.agents import is_installed
from vitwire.v1 import encoder_pb2 as pb
from vitwire.v1.encoder_pb2_grpc import EncoderServiceStub
from vitwire_server.core.grids import Grid
from waiting import until

pytestmark = pytest.mark.skipif(not is_installed(), reason="NIXL is not installed")
GRID = (1, 8, 8)
COLUMNS = 3 * 2 * 14 * 14
ROWS = 16 * 64 * 4
"""Bytes of an embedding: a page of the store."""
ROOM = 4
NIXL = ("--nixl", "--nixl-seconds", "60")
FLAGS = (*NIXL, "--graphs", "off", "--dtype", "float32", "--canary-seconds", "0", *PIXELS_ONLY)
STORE = (*FLAGS, "--cache-bytes", str(1 << 20), "--store-bytes", str(ROOM * ROWS))


server = entered(
    lambda checkpoints, request: emptied(checkpoints("qwen2_vl"), *STORE, "--rpc-processes", request.param),
    params=[pytest.param("1", marks=pytest.mark.matrix), "2"],
)
client = entered(lambda server: Client(server.target, delivery="stream"), scope="function")
nixl = entered(lambda server: Client(server.target, delivery="nixl", timeout=60))
"""A consumer."""


@pytest.fixture(scope="module")
def expected(references: Callable[[str, torch.dtype], Reference]) -> Callable[[int], Array]:
    reference = references("qwen2_vl", torch.float32)
    return lambda seed: reference.encode(torch.from_numpy(pixels(seed)), [Grid(*GRID)])[0]


def pixels(seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((64, COLUMNS)).astype(np.float32)


def image(seed: int) -> Item:
    return Item(pixels(seed), GRID, content_id=f"image {seed}")


def ask(seed: int) -> Item:
    return Item(None, GRID, content_id=f"image {seed}")


class Counts:
    """What was counted since this was made."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._before = self._now()

    def _now(self) -> tuple[float, ...]:
        metric = self._server.metric
        return (
            metric("vitwire_copied_bytes_total", to="host"),
            metric("vitwire_copied_bytes_total", to="device"),
            metric("vitwire_store_hits_total"),
            metric("vitwire_delivered_bytes_total", way="nixl"),
        )

    @property
    def since(self) -> tuple[int, ...]:
        """Bytes copied to the host and back, items delivered from the device, and their bytes."""
        return tuple(int(now - then) for now, then in zip(self._now(), self._before, strict=True))


def test_rows_wait_on_the_device_and_reach_a_consumer_without_a_copy(
    server: ServerProcess, client: Client, nixl: Client, expected: Callable[[int], Array]
) -> None:
    counts = Counts(server)
    (stored,) = client.store([image(1)])
    assert stored.shape == (16, 64)
    assert server.metric("vitwire_store_bytes") >= ROWS
    for turn in (1, 2):
        (embedding,) = nixl.encode([ask(1)])
        assert embedding.report.path == "cache"
        assert not embedding.report.delivery_fallback
        assert counts.since == (0, 0, turn, turn * ROWS)
    np.testing.assert_allclose(embedding.numpy(), expected(1), atol=1e-4, rtol=1e-4)
    for _ in range(2):  # the second time from the host
        (streamed,) = client.encode([ask(1)])
        np.testing.assert_array_equal(streamed.numpy(), embedding.numpy())
    assert counts.since == (ROWS, 0, 2, 2 * ROWS)
    (again,) = nixl.encode([ask(1)])
    np.testing.assert_array_equal(streamed.numpy(), again.numpy())
    assert counts.since == (ROWS, 0, 3, 3 * ROWS)


def test_a_consumer_joins_rows_that_are_being_computed(
    server: ServerProcess, client: Client, nixl: Client, expected: Callable[[int], Array]
) -> None:
    counts = Counts(server)
    with ThreadPoolExecutor(1) as threads:
        steps = client.iter_store([image(2)])
        _, accepted = next(steps)
        assert isinstance(accepted, Accepted)
        waiting = threads.submit(nixl.encode, [ask(2)])
        assert [type(answer) for _, answer in steps] == [Stored]
        (embedding,) = waiting.result(60)
    np.testing.assert_allclose(embedding.numpy(), expected(2), atol=1e-4, rtol=1e-4)
    assert counts.since == (0, 0, 1, ROWS)


def test_what_has_no_room_moves_to_the_host_and_is_found_there(
    server: ServerProcess, client: Client, nixl: Client, expected: Callable[[int], Array]
) -> None:
    seeds = range(10, 10 + 3 * ROOM)
    client.store([image(seed) for seed in seeds])
    assert server.metric("vitwire_store_bytes") == ROOM * ROWS
    until(lambda: server.metric("vitwire_cache_bytes") >= 2 * ROOM * ROWS)
    counts = Counts(server)
    for seed in (*seeds, *reversed(seeds)):
        (embedding,) = nixl.encode([ask(seed)])
        np.testing.assert_allclose(embedding.numpy(), expected(seed), atol=1e-4, rtol=1e-4)
    assert counts.since == (0, 0, 2 * ROOM, 6 * ROOM * ROWS)
    assert server.metric("vitwire_store_bytes") == ROOM * ROWS


def test_many_callers_at_once_get_their_rows_and_one_copy_is_made(
    server: ServerProcess, client: Client, nixl: Client, expected: Callable[[int], Array]
) -> None:
    seeds = range(30, 30 + ROOM)
    client.store([image(seed) for seed in seeds])
    until(lambda: server.metric("vitwire_cache_bytes") < 1 << 20)
    rows = {seed: expected(seed) for seed in seeds}
    counts = Counts(server)
    begin = threading.Barrier(8)

    def fetch(number: int) -> None:
        begin.wait(60)
        for seed in seeds:
            (embedding,) = (nixl if number % 2 else client).encode([ask(seed)])
            np.testing.assert_allclose(embedding.numpy(), rows[seed], atol=1e-4, rtol=1e-4)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(fetch, range(8)))
    to_host, to_device, from_device, _ = counts.since
    assert (to_host, to_device, from_device) == (ROOM * ROWS, 0, 4 * ROOM)


def test_the_same_pixels_are_answered_from_the_device(server: ServerProcess, client: Client, nixl: Client) -> None:
    client.store([image(40)])
    counts = Counts(server)
    (embedding,) = nixl.encode([Item(pixels(40), GRID)])
    assert embedding.report.path == "cache"
    (stored,) = client.store([Item(pixels(40), GRID, content_id="another name")])
    assert stored.report.path == "cache"
    assert counts.since == (0, 0, 1, ROWS)
    (other,) = client.encode([Item(pixels(40), GRID)])
    np.testing.assert_array_equal(other.numpy(), embedding.numpy())


def test_rows_that_cannot_be_delivered_come_in_the_response(
    server: ServerProcess, client: Client, expected: Callable[[int], Array]
) -> None:
    client.store([image(50)])
    counts = Counts(server)
    metadata = b"nixlSerDes|Agent" + (7).to_bytes(8, "little") + b"mallory|Conns"
    delivery = pb.Delivery(
        agent="mallory", agent_metadata=metadata, memory=pb.MEMORY_KIND_HOST, address=4096, bytes=8192
    )
    for nbytes, reason in ((ROWS, "refused"), (8, "too_small")):
        item = pb.Item(content_id="image 50", region=pb.Region(offset=0, bytes=nbytes))
        with grpc.insecure_channel(server.target) as channel:
            request = pb.EncodeRequest(items=[item], delivery=delivery)
            (response,) = EncoderServiceStub(channel).Encode(request, timeout=60)
        assert response.report.delivery_fallback == reason
        rows = np.frombuffer(response.chunk.data, np.float32).reshape(16, 64)
        np.testing.assert_allclose(rows, expected(50), atol=1e-4, rtol=1e-4)
    assert counts.since[0] == ROWS


def test_callers_that_leave_hold_nothing(server: ServerProcess, client: Client, nixl: Client) -> None:
    for seed in range(60, 60 + 2 * ROOM):
        steps = client.iter_store([image(seed)])
        next(steps)
        steps.close()
        with (
            Client(server.target, timeout=0.02, max_retries=0) as impatient,
            pytest.raises((DeadlineExceeded, NotCached)),
        ):
            impatient.encode([ask(seed), ask(seed), Item(None, GRID, content_id="nothing")])
    client.store([image(seed) for seed in range(80, 80 + ROOM)])
    assert server.metric("vitwire_store_bytes") == ROOM * ROWS
    counts = Counts(server)
    nixl.encode([ask(seed) for seed in range(80, 80 + ROOM)])
    assert counts.since == (0, 0, ROOM, ROOM * ROWS)
    until(lambda: server.metric("vitwire_admitted_items") == 0)


@pytest.mark.parametrize("flags", [("--store-bytes", "0"), ("--store-bytes", str(ROWS - 1))])
def test_rows_wait_on_the_host_where_the_device_has_no_room(
    checkpoints: Checkpoints, flags: tuple[str, ...], expected: Callable[[int], Array]
) -> None:
    cache = ("--cache-bytes", str(1 << 20))
    with (
        serving(checkpoints("qwen2_vl"), *FLAGS, *cache, *flags) as server,
        Client(server.target, delivery="nixl", timeout=60) as nixl,
    ):
        counts = Counts(server)
        nixl.store([image(1)])
        until(lambda: counts.since[0] == ROWS)
        assert server.metric("vitwire_store_bytes") == 0
        (embedding,) = nixl.encode([ask(1)])
        np.testing.assert_allclose(embedding.numpy(), expected(1), atol=1e-4, rtol=1e-4)


def test_rows_that_leave_the_host_are_gone(checkpoints: Checkpoints) -> None:
    """The host's bound holds for rows that moved there, and a server that is stopped meanwhile exits."""
    cache = ("--cache-bytes", str(4 * ROWS), "--store-bytes", str(2 * ROWS))
    with (
        serving(checkpoints("qwen2_vl"), *FLAGS, *cache) as server,
        Client(server.target, delivery="nixl", timeout=60) as nixl,
    ):
        nixl.store([image(seed) for seed in range(20)])
        assert server.metric("vitwire_cache_bytes") <= 4 * ROWS
        assert server.metric("vitwire_store_bytes") == 2 * ROWS
        with pytest.raises(NotCached):
            nixl.encode([ask(0)])
        nixl.encode([ask(18), ask(19)])
        nixl.store([image(seed) for seed in range(20, 60)])
        assert server.stop() == 0
