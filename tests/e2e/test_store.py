"""Items whose rows are only stored, through real requests: accepted early, joined in flight, fetched by content id."""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Self

import grpc
import numpy as np
import pytest
import skimage
import torch

from checkpoints import Checkpoints
from entered import entered
from faults import FAULTY
from reference import Array, Reference
from servers import PIXELS_ONLY, ServerProcess, emptied, serving
from vitwire import (
    Accepted,
    AsyncClient,
    Client,
    DeadlineExceeded,
    Embedding,
    EncodeFailed,
    InvalidItem,
    Item,
    NotCached,
    Stored,
    Unavailable,
)
from vitwire._transport.uploads import to_wire
from vitwire.v1 import encoder_pb2 as pb
from vitwire.v1.encoder_pb2_grpc import EncoderServiceStub
from vitwire_server.core.grids import Grid

GRID = (1, 8, 4)
COLUMNS = 3 * 2 * 16 * 16
BUDGETS = ("--graphs", "simulated", "--budgets", "16,64", "--dtype", "float32")
CACHE = (*BUDGETS, "--cache-bytes", "3000000", "--canary-seconds", "0")


server = entered(
    lambda checkpoints, fault, request: emptied(
        checkpoints("qwen3_vl"), *CACHE, "--rpc-processes", request.param, program=(FAULTY, str(fault))
    ),
    params=[pytest.param("1", marks=pytest.mark.matrix), "2"],
)
client = entered(lambda server: Client(server.target), scope="function")


@pytest.fixture(scope="module")
def expected(references: Callable[[str, torch.dtype], Reference]) -> Callable[[Array], Array]:
    reference = references("qwen3_vl", torch.float32)
    return lambda pixels: reference.encode(torch.from_numpy(pixels), [Grid(*GRID)])[0]


def pixels(seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((32, COLUMNS)).astype(np.float32)


def image(seed: int, content_id: str | None = None) -> Item:
    return Item(pixels(seed), GRID, content_id=content_id)


def ask(content_id: str) -> Item:
    return Item(None, GRID, content_id=content_id)


def test_stored_rows_are_those_of_transformers(client: Client, expected: Callable[[Array], Array]) -> None:
    answers = list(client.iter_store([image(1, "one"), image(2, "two")]))
    for index in (0, 1):
        accepted, stored = (answer for position, answer in answers if position == index)
        assert isinstance(accepted, Accepted)
        assert (accepted.grid, accepted.tokens) == (GRID, 8)
        assert accepted.forecast >= 0
        assert isinstance(stored, Stored)
        assert (stored.shape[0], stored.grid, stored.report.path) == (8, GRID, "graph")
    for seed, embedding in zip((1, 2), client.encode([ask("one"), ask("two")]), strict=True):
        assert embedding.report.path == "cache"
        np.testing.assert_allclose(embedding.numpy(), expected(pixels(seed)), atol=1e-4, rtol=1e-4)


def test_what_is_cached_is_accepted_and_stored_at_once(client: Client) -> None:
    client.store([image(3, "three")])
    (stored,) = client.store([image(3, "three again")])
    assert stored.report.path == "cache"
    assert client.encode([ask("three again")])[0].report.path == "cache"


class Upload:
    """One item on a stream of its own, whose bytes come when the test says."""

    def __init__(self, server: ServerProcess, content_id: str, seed: int) -> None:
        self._raw = pixels(seed).tobytes()
        self._outgoing: SimpleQueue[pb.EncodeStreamRequest | None] = SimpleQueue()
        self._channel = grpc.insecure_channel(server.target)
        tensor = pb.Tensor(data_type=pb.DATA_TYPE_FLOAT32, shape=(32, COLUMNS))
        grid, image = pb.Grid(t=1, h=8, w=4), pb.MODALITY_IMAGE
        header = pb.Item(modality=image, grid=grid, content_id=content_id, store_only=True, pixels=tensor)
        self._outgoing.put(pb.EncodeStreamRequest(header=pb.EncodeStreamHeader(item=7, header=header)))
        self.responses = EncoderServiceStub(self._channel).EncodeStream(iter(self._outgoing.get, None))

    def ask(self, item: int, content_id: str) -> None:
        """Ask for rows on the same stream."""
        header = pb.EncodeStreamHeader(item=item, header=pb.Item(content_id=content_id))
        self._outgoing.put(pb.EncodeStreamRequest(header=header))

    def send(self) -> None:
        chunk = pb.EncodeStreamChunk(item=7, data=self._raw)
        self._outgoing.put(pb.EncodeStreamRequest(chunk=chunk))
        self._outgoing.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.responses.cancel()
        self._outgoing.put(None)
        self._channel.close()


@contextmanager
def lookup(server: ServerProcess, content_id: str) -> Iterator["Future[list[Embedding]]"]:
    """A request for a content id, in a thread."""
    with Client(server.target) as client, ThreadPoolExecutor(1) as threads:
        yield threads.submit(client.encode, [ask(content_id)])


def waits(future: "Future[list[Embedding]]") -> bool:
    """Whether it is not answered yet, although there was time."""
    done, _ = wait([future], timeout=0.5)
    return not done


def test_an_item_is_accepted_before_its_bytes_and_lookups_wait_for_it(
    server: ServerProcess, expected: Callable[[Array], Array]
) -> None:
    with Upload(server, "slow", 4) as upload:
        first = next(upload.responses)
        assert first.WhichOneof("result") == "accepted"
        assert (first.item, first.accepted.tokens, first.accepted.grid.h) == (7, 8, 8)
        with lookup(server, "slow") as waiting:
            assert waits(waiting)
            upload.send()
            (last,) = upload.responses
            assert (last.WhichOneof("result"), last.stored.shape[0]) == ("stored", 8)
            (embedding,) = waiting.result(60)
    np.testing.assert_allclose(embedding.numpy(), expected(pixels(4)), atol=1e-4, rtol=1e-4)


def test_a_lookup_ends_when_the_upload_that_it_waits_for_is_given_up(server: ServerProcess) -> None:
    with Upload(server, "given up", 5) as upload:
        next(upload.responses)
        with lookup(server, "given up") as waiting:
            assert waits(waiting)
            upload.responses.cancel()
            with pytest.raises(NotCached):
                waiting.result(60)


def test_a_lookup_shares_the_failure_of_what_it_waits_for(server: ServerProcess, fault: Path) -> None:
    with Upload(server, "fails", 6) as upload:
        next(upload.responses)
        with lookup(server, "fails") as waiting:
            assert waits(waiting)
            fault.write_text("fail")
            try:
                upload.send()
                (last,) = upload.responses
                assert last.WhichOneof("result") == "error"
                with pytest.raises(EncodeFailed):
                    waiting.result(60)
            finally:
                fault.write_text("")


def test_a_lookup_that_leaves_harms_nobody(server: ServerProcess, client: Client) -> None:
    with Upload(server, "left alone", 7) as upload:
        next(upload.responses)
        with Client(server.target, timeout=0.3, max_retries=0) as impatient, pytest.raises(DeadlineExceeded):
            impatient.encode([ask("left alone")])
        upload.send()
        (last,) = upload.responses
        assert last.WhichOneof("result") == "stored"
    assert client.encode([ask("left alone")])[0].shape[0] == 8


def test_a_stream_may_wait_for_its_own_upload_however_often(server: ServerProcess, client: Client) -> None:
    """Its lookups never keep the server from reading the bytes that they wait for; those beyond a bound are refused."""
    most = client.model().limits.items_per_request
    with Upload(server, "own", 12) as upload:
        next(upload.responses)
        for item in range(100, 100 + most + 10):
            upload.ask(item, "own")
        upload.send()
        answers = [each for each in upload.responses if each.WhichOneof("result") != "chunk" or each.chunk.last]
    kinds = Counter(each.WhichOneof("result") for each in answers)
    assert kinds == {"stored": 1, "chunk": most, "error": 10}
    assert {each.error.code for each in answers if each.HasField("error")} == {8}, "RESOURCE_EXHAUSTED"


async def test_the_asyncio_client_stores(server: ServerProcess) -> None:
    async with AsyncClient(server.target) as client:
        (stored,) = await client.store([image(8, "eight")])
        (embedding,) = await client.encode([ask("eight")])
    assert stored.shape == embedding.shape


def test_a_file_is_accepted_with_the_grid_that_the_server_chose(client: Client) -> None:
    photo = Path(skimage.__file__).parent / "data" / "camera.png"
    if not client.model().prepared or not photo.exists():
        pytest.skip("this model does not decode")
    item = Item(encoded=photo.read_bytes(), content_id="a file")
    accepted, stored = (answer for _, answer in client.iter_store([item]))
    assert isinstance(accepted, Accepted)
    assert isinstance(stored, Stored)
    assert accepted.grid == stored.grid
    assert stored.shape[0] == accepted.tokens
    assert client.encode([Item(content_id="a file")])[0].grid == accepted.grid


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"content_id": ""}, "items[0].content_id"),
        ({"region": pb.Region(offset=0, bytes=1)}, "items[0].store_only"),
    ],
)
def test_wrong_fields_are_named(server: ServerProcess, change: dict[str, object], field: str) -> None:
    item = to_wire(image(9, "nine"), store_only=True)
    message = pb.Item(**{"content_id": "nine", "store_only": True} | change)
    message.MergeFrom(pb.Item(modality=item.message.modality, grid=item.message.grid, pixels=item.message.pixels))
    message.pixels.data = bytes(item.tensors.pixels)
    with grpc.insecure_channel(server.target) as channel, pytest.raises(grpc.RpcError) as raised:
        list(EncoderServiceStub(channel).Encode(pb.EncodeRequest(items=[message])))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in raised.value.details()


def test_items_that_cannot_be_stored_are_refused_at_once(client: Client) -> None:
    with pytest.raises(InvalidItem, match=r"items\[0\].content_id"):
        client.store([image(1)])


def test_without_pixels_it_is_asked_whether_rows_are_cached(server: ServerProcess, client: Client) -> None:
    with pytest.raises(NotCached):
        client.store([ask("ten")])
    client.store([image(10, "ten")])
    (answer,) = client.iter_store([ask("ten")])
    assert isinstance(answer[1], Stored)
    assert (answer[1].grid, answer[1].shape[0], answer[1].report.path) == (GRID, 8, "cache")
    with Upload(server, "under way", 11) as upload:
        next(upload.responses)
        with pytest.raises(NotCached):
            client.store([ask("under way")])


@pytest.mark.parametrize("processes", ["1", "2"])
def test_lookups_that_wait_are_answered_when_the_server_stops(checkpoints: Checkpoints, processes: str) -> None:
    flags = (*CACHE, "--rpc-processes", processes, "--drain-seconds", "1")
    with serving(checkpoints("qwen3_vl"), *PIXELS_ONLY, *flags) as server, Upload(server, "never", 13) as upload:
        next(upload.responses)
        with Client(server.target, timeout=60, max_retries=0) as client, ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(client.encode, [ask("never")])
            assert waits(waiting)
            assert server.stop() == 0
            with pytest.raises((Unavailable, NotCached)):
                waiting.result(60)
