"""Both clients against a service on a loopback socket."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from io import BytesIO
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2
from PIL import Image

from both_clients import Call, both, large
from fake_service import SERVICE, Fake, Running, abort, bad_request, expected, item, retry_info, serving
from vitwire import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    EncodeFailed,
    InvalidItem,
    Item,
    NotCached,
    Overloaded,
    Unauthenticated,
    Unavailable,
)
from vitwire.v1 import encoder_pb2 as pb


@both
async def test_embeddings_come_in_the_order_of_the_items(client: Any, running: Running) -> None:
    embeddings = await client.encode([item(3, 5.0), item(7, 9.0)], output_type="float32")
    assert [each.dtype for each in embeddings] == ["float32"] * 2
    np.testing.assert_array_equal(embeddings[0].numpy(), expected(3, 5.0))
    np.testing.assert_array_equal(embeddings[1].numpy(), expected(7, 9.0))
    report = embeddings[1].report
    assert (report.path, report.budget_tokens, report.tokens, report.encoded) == ("graph", 64, 7, 1.0)
    assert running.fake.methods == ["GetModel", "Encode"]
    assert await client.encode([]) == []


@both
async def test_large_requests_are_streamed(client: Any, running: Running) -> None:
    embeddings = await client.encode([item(2), large(), item(4, 8.0)])
    assert running.fake.methods == ["GetModel", "EncodeStream"]
    assert [each.dtype for each in embeddings] == ["bfloat16"] * 3
    for got, (tokens, value) in zip(embeddings, [(2, 1.0), (4, 3.0), (4, 8.0)], strict=True):
        np.testing.assert_array_equal(got.numpy(), expected(tokens, value))


@both
@pytest.mark.parametrize("spread", [2, 3, 8])
async def test_a_request_may_be_spread_over_several_calls(make: Call, running: Running, spread: int) -> None:
    async with make(running.target, timeout=20, spread=spread) as client:
        embeddings = await client.encode([item(2, float(value)) for value in range(5)])
    assert running.fake.methods.count("Encode") == min(spread, 5)
    for value, got in enumerate(embeddings):
        np.testing.assert_array_equal(got.numpy(), expected(2, float(value)))


@both
@pytest.mark.parametrize("spread", [1, 2])
async def test_a_failed_item_does_not_stop_the_others(make: Call, running: Running, spread: int) -> None:
    items = [item(), item(content_id="error:NOT_FOUND"), item(), item(content_id="error:INTERNAL")]
    async with make(running.target, timeout=20, spread=spread) as client:
        seen = []
        with pytest.raises(NotCached) as raised:  # noqa: PT012  # what came before the error counts
            async for index, _ in client.iter_encode(items):
                seen.append(index)
        assert sorted(seen) == [0, 2]
        assert raised.value.item == 1
        results = dict([each async for each in client.iter_encode(items, return_exceptions=True)])
        assert isinstance(results[1], NotCached)
        assert isinstance(results[3], EncodeFailed)
        assert results[3].item == 3
        assert set(running.fake.methods[-spread:]) == {"EncodeStream"}, "where an invalid item fails alone too"
        with pytest.raises(NotCached):
            await client.encode(items)


@both
async def test_the_model_is_asked_for_once_unless_it_is_to_be_refreshed(client: Any, running: Running) -> None:
    model = await client.model()
    running.fake.fingerprint = "cd"
    assert await client.model() is model
    assert running.fake.methods == ["GetModel"]
    assert (model.model_type, model.dtype, model.deepstack_levels) == ("qwen3_vl", "bfloat16", 2)
    assert (model.prepared, model.preparation_fingerprint) == (("image", "video"), "cd")
    assert model.budgets[0].segment_patches == 256
    assert model.limits.items_per_request == 16
    assert model.weights_fingerprint != "cd"
    assert (await client.model(refresh=True)).weights_fingerprint == "cd"
    assert (await client.model()).weights_fingerprint == "cd"


@both
async def test_images_and_clips_are_prepared(client: Any) -> None:
    image = np.random.default_rng(0).integers(0, 255, (32, 40, 3), np.uint8)
    one, two = await client.encode_images([image, image[:16, :24]], timeout=10)
    assert (one.shape, two.shape) == ((20, 12), (6, 12))
    (clip,) = await client.encode_clips([np.stack([image] * 3)])
    assert clip.shape == (40, 12)
    with pytest.raises(InvalidItem) as raised:
        await client.encode_images([image, image.astype(np.float32)])
    assert raised.value.item == 1


@both
async def test_health_is_seen_even_when_bad(client: Any, running: Running) -> None:
    assert await client.health() == "SERVING"
    running.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert await client.health() == "NOT_SERVING"
    assert await client.health("nonsense") == "SERVICE_UNKNOWN"


@both
async def test_statuses_of_the_request_are_translated(make: Call, running: Running) -> None:
    def refuse(code: grpc.StatusCode, *details: Any) -> None:
        running.fake.before = lambda context: abort(context, code, *details)

    async with make(running.target, timeout=20, max_retries=0) as client:
        await client.model()
        refuse(grpc.StatusCode.UNAUTHENTICATED)
        with pytest.raises(Unauthenticated):
            await client.encode([item()])
        refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_info(1, 0))
        with pytest.raises(Overloaded) as overloaded:
            await client.encode([item()])
        assert overloaded.value.retry_after == 1.0
        refuse(grpc.StatusCode.INVALID_ARGUMENT, bad_request("items[1].grid"))
        with pytest.raises(InvalidItem) as invalid:
            await client.encode([item(), item()])
        assert (invalid.value.violations[0].field, invalid.value.item) == ("items[1].grid", 1)


@both
async def test_a_refusal_in_the_middle_of_an_upload_keeps_its_status(make: Call, running: Running) -> None:
    async with make(running.target, timeout=20, max_retries=0) as client:
        await client.model()
        running.fake.before = lambda context: abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, retry_info(2, 0))
        for _ in range(20):
            with pytest.raises(Overloaded) as raised:
                await client.encode([large()])
            assert raised.value.retry_after == 2.0


@both
@pytest.mark.parametrize("make_item", [partial(item, 4), large], ids=["message", "upload"])
async def test_what_is_sent_again_arrives_whole(client: Any, make_item: Any, running: Running) -> None:
    seen: list[int] = []

    def refuse(context: grpc.ServicerContext) -> None:
        seen.append(0)
        if len(seen) % 2:
            abort(context, grpc.StatusCode.UNAVAILABLE)

    await client.model()
    running.fake.before = refuse
    for value in range(10):  # the service checks the number of bytes
        (embedding,) = await client.encode([make_item(float(value))])
        np.testing.assert_array_equal(embedding.numpy(), expected(4, float(value)))


@both
async def test_the_timeout_is_a_deadline(make: Call, running: Running) -> None:
    def slow(responses: Iterator[Any]) -> Iterator[Any]:
        time.sleep(1)
        yield from responses

    running.fake.bend = slow
    async with make(running.target) as client:
        with pytest.raises(DeadlineExceeded):
            await client.encode([item()], timeout=0.3)
        with pytest.raises(DeadlineExceeded):
            await client.encode([item()], timeout=0)


def lose_last(responses: Iterator[Any]) -> Iterator[Any]:
    yield next(responses)


def garble(responses: Iterator[Any]) -> Iterator[Any]:
    for response in responses:
        response.chunk.row += 1
        yield response


@both
@pytest.mark.parametrize("bend", [lose_last, garble])
async def test_answers_that_break_the_contract_fail(client: Any, bend: Any, running: Running) -> None:
    running.fake.bend = bend
    with pytest.raises(EncodeFailed):
        await client.encode([item(), item()])


@both
async def test_a_server_that_goes_away_midway_is_unavailable(make: Call, running: Running) -> None:
    started = threading.Event()

    def hang(responses: Iterator[Any]) -> Iterator[Any]:
        yield next(responses)
        started.set()
        time.sleep(3)

    running.fake.bend = hang
    async with make(running.target) as client:
        call = asyncio.create_task(client.encode([item()]))
        await asyncio.to_thread(started.wait, 10)
        running.server.stop(0)
        begun = time.monotonic()
        with pytest.raises((Unavailable, EncodeFailed)):
            await asyncio.wait_for(call, 10)
        assert time.monotonic() - begun < 8, "well before the default timeout"


def trickle(fake: Fake) -> Callable[[Iterator[Any]], Iterator[Any]]:
    def responses(source: Iterator[Any]) -> Iterator[Any]:
        for response in source:
            yield response
            if response.chunk.last:
                fake.cancelled.wait(10)

    return responses


@both
@pytest.mark.parametrize("spread", [1, 2])
@pytest.mark.parametrize("make_item", [item, large])
async def test_leaving_the_loop_cancels_the_call(make: Call, spread: int, make_item: Any, running: Running) -> None:
    running.fake.bend = trickle(running.fake)
    async with make(running.target, spread=spread) as client:
        async with aclosing(client.iter_encode([make_item() for _ in range(4)])) as results:
            async for _ in results:
                break
        assert await asyncio.to_thread(running.fake.cancelled.wait, 5)


@pytest.mark.parametrize("make_item", [item, large])
async def test_cancelling_the_task_cancels_the_call(make_item: Any) -> None:
    fake = Fake()
    fake.bend = trickle(fake)
    with serving(fake) as running:
        async with AsyncClient(running.target) as client:
            await client.model()
            task = asyncio.create_task(client.encode([make_item(), make_item()]))
            await asyncio.sleep(0.5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(fake.cancelled.wait, 5)


@both
async def test_closing_ends_the_calls_in_flight(make: Call, running: Running) -> None:
    running.fake.bend = trickle(running.fake)
    client = make(running.target)
    async with client:
        await client.model()
        task = asyncio.create_task(client.encode([item(), item()]))
        await asyncio.sleep(0.5)
    with pytest.raises(EncodeFailed) as raised:
        await asyncio.wait_for(task, 5)
    assert raised.value.code == "CANCELLED"


def test_one_client_serves_many_threads(running: Running) -> None:
    wrong: list[int] = []
    with Client(running.target, timeout=30) as client:

        def work(value: int) -> None:
            for _ in range(10):
                (got,) = client.encode([item(3, float(value))])
                if not np.array_equal(got.numpy(), expected(3, float(value))):
                    wrong.append(value)

        threads = [threading.Thread(target=work, args=(value,)) for value in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []
    assert running.fake.methods.count("Encode") == 60


@both
@pytest.mark.parametrize(
    ("answer", "reason"),
    [(pb.GetModelResponse().SerializeToString(), "embedding_width 0"), (b"\xff", "cannot be parsed")],
    ids=["contradictory", "no message"],
)
async def test_a_model_that_is_none_is_refused(make: Call, answer: bytes, reason: str) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    method = grpc.unary_unary_rpc_method_handler(lambda request, context: answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"GetModel": method}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    async with make(f"127.0.0.1:{port}", timeout=20) as client:
        with pytest.raises(EncodeFailed, match=reason):
            await client.model()
    server.stop(0)


@both
async def test_options_are_sent_to_servers_that_list_them_only(client: Any, running: Running) -> None:
    """An older server would ignore the field, and answer with rows of another grid."""
    photo = BytesIO()
    Image.new("RGB", (40, 40)).save(photo, "PNG")
    plain, sized = Item(encoded=photo.getvalue()), Item(encoded=photo.getvalue(), options={"max_pixels": 99})
    for takes in ((), ("min_pixels",)):
        running.fake.takes = takes
        for name in ("encode", "encode_cached", "store"):
            items = [replace(each, content_id="name" * (name == "store")) for each in (plain, sized)]
            with pytest.raises(InvalidItem, match="the server has no option max_pixels for qwen3_vl") as error:
                await getattr(client, name)(items)
            assert error.value.item == 1
            assert [each.field for each in error.value.violations] == ["items[1].options.max_pixels"]
        assert set(running.fake.methods) == {"GetModel"}
    running.fake.takes = ("min_pixels", "max_pixels")  # it was upgraded
    await client.encode([plain, sized])
    assert [each.HasField("options") for each in running.fake.sent] == [False, True]
    assert running.fake.sent[1].options == pb.ProcessorOptions(max_pixels=99)
    assert (await client.model()).options == ("min_pixels", "max_pixels")
