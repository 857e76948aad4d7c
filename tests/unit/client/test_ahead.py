"""`iter_encode` of items that are read while earlier ones are encoded."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Any

import grpc
import numpy as np
import pytest

from both_clients import Call, InThread, both
from fake_service import Fake, Running, abort, expected, item, serving
from vitwire import AsyncClient, InvalidItem, Item, NotCached, VitwireError
from vitwire._transport.ahead import AHEAD_ITEMS, Window


async def asynchronous(items: Iterator[Item]) -> AsyncIterator[Item]:
    while each := await asyncio.to_thread(next, items, None):
        yield each


sources = pytest.mark.parametrize(
    ("make", "source"),
    [(InThread, iter), (AsyncClient, iter), (AsyncClient, asynchronous)],
    ids=["Client", "AsyncClient", "AsyncClient, asynchronous"],
)
Source = Callable[[Iterator[Item]], Any]


@sources
async def test_every_item_is_answered_at_its_position(client: Any, source: Source) -> None:
    items = (item(1 + index % 5, float(index)) for index in range(200))
    results = {index: each async for index, each in client.iter_encode(source(items), output_type="float32")}
    assert sorted(results) == list(range(200))
    for index, embedding in results.items():
        np.testing.assert_array_equal(embedding.numpy(), expected(1 + index % 5, float(index)))


@sources
async def test_no_items_need_no_server(make: Call, source: Source) -> None:
    async with make("127.0.0.1:1", timeout=60) as client:
        assert [each async for each in client.iter_encode(source(iter(())))] == []


@sources
async def test_results_come_while_an_item_is_awaited(make: Call, source: Source, running: Running) -> None:
    first = threading.Event()

    def items() -> Iterator[Item]:
        yield item(2, 1.0)
        assert first.wait(60)
        yield item(2, 2.0)

    async with make(running.target, timeout=90) as client:
        order = []
        async for index, _ in client.iter_encode(source(items())):
            order.append(index)
            first.set()
    assert order == [0, 1]


@sources
async def test_reading_ahead_is_bounded(make: Call, source: Source, running: Running) -> None:
    read = 0

    def items() -> Iterator[Item]:
        nonlocal read
        for _ in range(AHEAD_ITEMS * 4):
            read += 1
            yield item(1)

    async with make(running.target, timeout=90) as client:
        taken = 0
        async for _ in client.iter_encode(source(items())):
            taken += 1
            assert read <= taken + AHEAD_ITEMS
        assert taken == AHEAD_ITEMS * 4


@sources
async def test_an_error_of_the_iterable_is_raised(client: Any, source: Source) -> None:
    def items() -> Iterator[Item]:
        yield item(1)
        raise OSError("cannot read the next image")

    with pytest.raises(OSError, match="cannot read the next image"):
        async for _ in client.iter_encode(source(items())):
            pass


@sources
async def test_errors_of_items_come_last_or_in_place(client: Any, source: Source) -> None:
    def items() -> Iterator[Item]:
        return (item(1, content_id="error:NOT_FOUND" if index in (3, 7) else None) for index in range(9))

    found: list[int] = []

    async def collect_each() -> None:
        async for index, _ in client.iter_encode(source(items())):
            found.append(index)

    with pytest.raises(NotCached) as failure:
        await collect_each()
    assert (sorted(found), failure.value.item) == ([0, 1, 2, 4, 5, 6, 8], 3)
    mixed = {i: each async for i, each in client.iter_encode(source(items()), return_exceptions=True)}
    assert [index for index, each in sorted(mixed.items()) if isinstance(each, VitwireError)] == [3, 7]


@both
async def test_an_error_of_a_request_ends_the_loop(make: Call) -> None:
    def before(context: grpc.ServicerContext) -> None:
        if fake.methods[-1] == "Encode":
            abort(context, grpc.StatusCode.INVALID_ARGUMENT)

    fake = Fake(before)
    with serving(fake) as running:
        async with make(running.target, timeout=60) as client:
            with pytest.raises(InvalidItem):
                async for _ in client.iter_encode(item(1) for _ in range(500)):
                    pass


@sources
async def test_leaving_the_loop_cancels_and_stops_reading(make: Call, source: Source) -> None:
    read, second = 0, threading.Event()

    def items() -> Iterator[Item]:
        nonlocal read
        while True:
            read += 1
            yield item(1)

    def bend(responses: Iterator[Any]) -> Iterator[Any]:
        if fake.methods.count("Encode") > 1:
            second.set()
            fake.cancelled.wait(60)
        yield from responses

    fake = Fake(bend=bend)
    with serving(fake) as running:
        async with make(running.target, timeout=90) as client:
            async with aclosing(client.iter_encode(source(items()))) as results:
                async for _ in results:
                    assert await asyncio.to_thread(second.wait, 60)
                    break
            assert await asyncio.to_thread(fake.cancelled.wait, 60)
            assert read <= AHEAD_ITEMS + 2


def test_items_that_wait_for_a_request_go_together() -> None:
    started: list[dict[int, Item]] = []
    window = Window(started.append)
    for _ in range(8 + 20):
        window.add(item(1))
    assert [len(group) for group in started] == [1] * 8
    window.request_ended()
    window.request_ended()
    assert [list(group) for group in started[8:]] == [list(range(8, 24)), list(range(24, 28))]
    assert not window.is_complete
    window.end()
    for index in range(28):
        window.taken(index)
    assert window.is_complete


def test_large_items_go_alone_and_fill_the_window() -> None:
    started: list[dict[int, Item]] = []
    window = Window(started.append)
    big = Item(np.zeros((32, 1 << 20), np.uint8), (1, 8, 4))
    for count in range(1, 5):
        assert window.has_room
        window.add(big)
        assert len(started) == count
    assert not window.has_room
    window.taken(2)
    assert window.has_room
