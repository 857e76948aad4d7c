"""The embedding cache, through real requests; every embedding is that of plain transformers."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch

import faulty_server
from checkpoints import Checkpoints
from entered import entered
from reference import Array, Reference
from servers import PIXELS_ONLY, ServerProcess, serving
from vitwire import AsyncClient, Client, InvalidItem, Item, NotCached
from vitwire.v1 import encoder_pb2 as pb
from vitwire.v1.encoder_pb2_grpc import EncoderServiceStub
from vitwire_server.core.grids import Grid
from waiting import until

COLUMNS = 3 * 2 * 16 * 16


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints, fault: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text("alice-has-a-long-token alice\nmallory-has-one-as-well mallory\n")
    flags = ("--cache-bytes", "3000000", "--graphs", "simulated", "--budgets", "16,64", "--dtype", "float32")
    guarded = ("--auth-tokens-file", str(tokens), "--canary-seconds", "0")
    with serving(
        checkpoints("qwen3_vl"), *PIXELS_ONLY, *flags, *guarded, program=(faulty_server.__file__, str(fault))
    ) as process:
        yield process
        hits = process.metric("vitwire_graph_hits_total") + process.metric("vitwire_cache_hits_total")
        assert process.metric("vitwire_items_total") == hits + process.metric("vitwire_eager_fallbacks_total")
        assert process.metric("vitwire_items_total", path="cache") == process.metric("vitwire_cache_hits_total")
        assert process.metric("vitwire_cache_bytes") <= 3_000_000
        assert process.metric("vitwire_admitted_bytes") == 0


alice = entered(lambda server: Client(server.target, token="alice-has-a-long-token"), scope="function")
mallory = entered(lambda server: Client(server.target, token="mallory-has-one-as-well"), scope="function")


@pytest.fixture(scope="module")
def expected(references: Callable[[str, torch.dtype], Reference]) -> Callable[[Array], Array]:
    reference = references("qwen3_vl", torch.float32)
    return lambda pixels: reference.encode(torch.from_numpy(pixels), [Grid(1, 8, 4)])[0]


def pixels(seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((32, COLUMNS)).astype(np.float32)


def image(seed: int, content_id: str | None = None) -> Item:
    return Item(pixels(seed), (1, 8, 4), content_id=content_id)


def ask(content_id: str, grid: tuple[int, int, int] = (1, 8, 4)) -> Item:
    return Item(None, grid, content_id=content_id)


def test_what_was_encoded_once_comes_from_the_cache(alice: Client, expected: Callable[[Array], Array]) -> None:
    (first,), (again,) = alice.encode([image(1)]), alice.encode([image(1)])
    assert (first.report.path, again.report.path) == ("graph", "cache")
    assert (again.report.budget_tokens, again.report.tokens) == (0, 8)
    for rows in (first, again):
        np.testing.assert_allclose(rows.numpy(), expected(pixels(1)), atol=1e-4, rtol=1e-4)
    (halves,) = alice.encode([image(1)], output_type="float16")
    assert (halves.report.path, halves.dtype) == ("graph", "float16")


def test_a_stream_is_looked_up_too(alice: Client, expected: Callable[[Array], Array]) -> None:
    """Requests above 4 MiB go as streams: 60 items of 98 KB."""
    items = [image(100 + seed) for seed in range(60)]
    first, again = alice.encode(items), alice.encode(items)
    assert {rows.report.path for rows in first} == {"graph"}
    assert {rows.report.path for rows in again} == {"cache"}
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    np.testing.assert_allclose(again[7].numpy(), expected(pixels(107)), atol=1e-4, rtol=1e-4)


def test_ask_before_upload(alice: Client, expected: Callable[[Array], Array]) -> None:
    with pytest.raises(NotCached, match="'photo'"):
        alice.encode([ask("photo")])
    alice.encode([image(2, "photo")])
    (found,) = alice.encode([ask("photo")])
    assert found.report.path == "cache"
    np.testing.assert_allclose(found.numpy(), expected(pixels(2)), atol=1e-4, rtol=1e-4)
    mixed = dict(alice.iter_encode([ask("photo"), ask("nothing"), image(3)], return_exceptions=True))
    assert isinstance(mixed[1], NotCached)
    assert not isinstance(mixed[0], Exception)
    assert not isinstance(mixed[2], Exception)
    with pytest.raises(NotCached):
        alice.encode([ask("photo", grid=(1, 4, 8))])


async def test_the_client_asks_first_and_uploads_what_is_unknown(server: ServerProcess, alice: Client) -> None:
    items = [image(20, "first"), image(21), image(22, "second"), image(23)]
    assert [rows.report.path for rows in alice.encode_cached(items[:2])] == ["graph", "graph"]
    seen = alice.encode_cached(items)
    assert [rows.report.path for rows in seen] == ["cache", "cache", "graph", "graph"]
    async with AsyncClient(server.target, token="alice-has-a-long-token") as client:
        again = await client.encode_cached(items)
        with pytest.raises(NotCached, match="'never sent'"):
            await client.encode_cached([items[0], ask("never sent")])
        with pytest.raises(InvalidItem, match=r"items\[1\]") as caught:
            await client.encode_cached([items[0], Item(pixels(1), (1, 2, 2), content_id="wrong")])
        assert caught.value.item == 1
    assert {rows.report.path for rows in again} == {"cache"}
    for one, other in zip(seen, again, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_the_latest_pixels_of_a_name_win(alice: Client, expected: Callable[[Array], Array]) -> None:
    alice.encode([image(4, "cat")])
    alice.encode([image(5, "cat")])
    (found,) = alice.encode([ask("cat")])
    np.testing.assert_allclose(found.numpy(), expected(pixels(5)), atol=1e-4, rtol=1e-4)


def test_nobody_sees_what_another_one_sent(alice: Client, mallory: Client) -> None:
    alice.encode([image(6, "secret")])
    with pytest.raises(NotCached):
        mallory.encode([ask("secret")])
    (own,) = mallory.encode([image(6)])
    assert own.report.path == "graph", "not even that these pixels were sent before"
    mallory.encode([image(7, "secret")])
    (found,) = alice.encode([ask("secret")])
    (sent,) = alice.encode([image(6)])
    np.testing.assert_array_equal(found.numpy(), sent.numpy())


def test_a_pruned_clip_comes_back_with_what_was_kept(alice: Client) -> None:
    frames = np.random.default_rng(8).standard_normal((64, COLUMNS)).astype(np.float32)
    clip = Item(frames, (4, 4, 4), "video", "clip", keep_ratio=0.5)
    (first,), (again,) = alice.encode([clip]), alice.encode([clip])
    assert again.report.path == "cache"
    assert again.report.kept == first.report.kept
    assert len(again.report.kept) == 8
    np.testing.assert_array_equal(first.numpy(), again.numpy())
    (found,) = alice.encode([Item(None, (4, 4, 4), "video", "clip", keep_ratio=0.5)])
    assert found.report.kept == first.report.kept
    (whole,) = alice.encode([Item(frames, (4, 4, 4), "video", "clip")])
    assert whole.shape[0] == 16


def test_identical_items_in_flight_are_encoded_once(server: ServerProcess, alice: Client, fault: Path) -> None:
    ran = server.metric("vitwire_graph_hits_total") + server.metric("vitwire_eager_fallbacks_total")
    fault.write_text("hang")
    with ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(alice.encode, [image(9)] * 3) for _ in range(6)]
        until(lambda: server.metric("vitwire_admitted_items") >= 18)
        fault.write_text("")
        paths = [rows.report.path for call in calls for rows in call.result(60)]
    assert sorted(paths) == ["cache"] * 17 + ["graph"]
    ran_now = server.metric("vitwire_graph_hits_total") + server.metric("vitwire_eager_fallbacks_total")
    assert ran_now == ran + 1


def test_who_leaves_takes_nobody_along(server: ServerProcess, alice: Client, fault: Path) -> None:
    def gone() -> float:
        dropped = server.metric("vitwire_cancelled_total", stage="queue")
        return dropped + server.metric("vitwire_expired_total", stage="queue")

    before = gone()
    fault.write_text("hang")
    with ThreadPoolExecutor(2) as pool:
        blocking = pool.submit(alice.encode, [image(11)])
        until(lambda: server.metric("vitwire_admitted_items") >= 1 and not server.metric("vitwire_queue_items"))
        with Client(server.target, token="alice-has-a-long-token", timeout=1.5) as leaving:
            pool.submit(leaving.encode, [image(10)])
            until(lambda: server.metric("vitwire_admitted_items") >= 2)
            with ThreadPoolExecutor(1) as other:
                staying = other.submit(alice.encode, [image(10)])
                until(lambda: gone() != before)
                fault.write_text("")
                assert staying.result(60)[0].report.path == "graph"
        assert len(blocking.result(60)) == 1


def test_a_cancelled_request_of_equal_items_is_not_computed(server: ServerProcess, alice: Client, fault: Path) -> None:
    """One of the equal items is queued, the others wait for it: all of them leave, and no other request is refused."""
    grey = pb.Tensor(data_type=pb.DATA_TYPE_UINT8, shape=[4, COLUMNS], data=bytes([9]) * (4 * COLUMNS))
    item = pb.Item(modality=pb.MODALITY_IMAGE, grid=pb.Grid(t=1, h=2, w=2), pixels=grey)
    token = [("authorization", "Bearer alice-has-a-long-token")]
    ran = server.metric("vitwire_batch_items_sum")
    fault.write_text("hang")
    with ThreadPoolExecutor(2) as pool, grpc.insecure_channel(server.target) as channel:
        blocking = pool.submit(alice.encode, [image(12)])
        until(lambda: server.metric("vitwire_admitted_items") >= 1 and not server.metric("vitwire_queue_items"))
        call = EncoderServiceStub(channel).Encode(pb.EncodeRequest(items=[item] * 100), metadata=token)
        until(lambda: server.metric("vitwire_admitted_items") >= 101)
        call.cancel()
        until(lambda: server.metric("vitwire_admitted_items") <= 1)
        queued = server.metric("vitwire_queue_items"), server.metric("vitwire_queue_bytes")
        bystander = pool.submit(alice.encode, [image(13)])
        fault.write_text("")
        assert queued == (0, 0)
        assert [len(each.result(60)) for each in (blocking, bystander)] == [1, 1]
    assert server.metric("vitwire_batch_items_sum") == ran + 2, "those of the other two requests"


def test_rows_that_are_not_finite_are_never_cached(server: ServerProcess, alice: Client) -> None:
    """Equal items that waited for one forward get its error, each with its own number."""
    nan = Item(np.full((32, COLUMNS), np.nan, np.float32), (1, 8, 4), content_id="nan")
    held = server.metric("vitwire_cache_bytes")
    for _ in range(2):
        results = dict(alice.iter_encode([nan] * 3, return_exceptions=True))
        assert {i: type(each) for i, each in results.items()} == dict.fromkeys(range(3), InvalidItem)
        assert all(f"items[{i}].pixels.data: holds NaN" in str(each) for i, each in results.items())
    assert server.metric("vitwire_cache_bytes") == held
    with pytest.raises(NotCached):
        alice.encode([ask("nan")])


def test_the_bound_on_bytes_holds(server: ServerProcess, alice: Client) -> None:
    before = server.metric("vitwire_cache_evictions_total")
    for seed in range(600, 1100, 50):
        alice.encode([image(seed + i) for i in range(50)])
    assert server.metric("vitwire_cache_bytes") <= 3_000_000
    assert server.metric("vitwire_cache_evictions_total") > before


def test_no_cache_no_name(checkpoints: Checkpoints) -> None:
    with serving(checkpoints("qwen3_vl"), *PIXELS_ONLY) as process, Client(process.target) as client:
        assert client.model().limits.cached_bytes == 0
        with pytest.raises(InvalidItem, match="--cache-bytes"):
            client.store([image(1, "photo")])
        client.encode([image(1, "photo")])
        assert client.encode([image(1, "photo")])[0].report.path == "eager"
        with pytest.raises(NotCached):
            client.encode([ask("photo")])
        assert process.metric("vitwire_cache_bytes") == 0
