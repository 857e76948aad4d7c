"""Calls to the encoder: which items share one, and when one is given up."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest

from entered import entered, entered_async
from fake_service import Fake, Running, serving
from vitwire import AsyncClient, InvalidItem, Item
from vitwire_gateway.images.batching import Batches

running = entered(lambda: serving(Fake()), scope="function")


@asynccontextmanager
async def batching(running: Running) -> AsyncIterator[Batches]:
    async with AsyncClient(running.target) as client:
        await client.model()
        yield Batches(client)


def item(value: float = 1.0, content_id: str | None = None) -> Item:
    return Item(np.full((4, 12), value, np.float32), (1, 2, 2), content_id=content_id)


batches = entered_async(batching)


async def test_items_go_at_once_unless_they_are_read_together(running: Running, batches: Batches) -> None:
    await asyncio.gather(batches.add(item()), batches.add(item()))
    assert running.fake.methods == ["GetModel", "Encode", "Encode"]
    with batches.together():
        first = batches.add(item())
        await asyncio.sleep(0.05)
        assert len(running.fake.methods) == 3, "another item is being read"
        with batches.together():
            second = batches.add(item())
    await asyncio.gather(first, second)
    with batches.together():
        alone = batches.add(item())
    await alone
    assert running.fake.methods[3:] == ["EncodeStream", "Encode"]


async def test_a_bad_item_leaves_others_of_its_call_alone(batches: Batches) -> None:
    with batches.together():
        found = [batches.add(item(content_id=name)) for name in ("a", "error:INVALID_ARGUMENT", "b")]
    first, bad, last = await asyncio.gather(*found, return_exceptions=True)
    assert isinstance(bad, InvalidItem)
    assert not isinstance(first, BaseException)
    assert not isinstance(last, BaseException)


@pytest.mark.parametrize("number", [1, 3])
async def test_a_call_that_nobody_waits_for_is_cancelled(running: Running, number: int, batches: Batches) -> None:
    entered, ended = threading.Event(), threading.Event()

    def before(context: grpc.ServicerContext) -> None:
        context.add_callback(ended.set)
        entered.set()
        assert ended.wait(30)

    running.fake.before = before
    with batches.together():
        answers = [batches.add(item()) for _ in range(number)]
    assert await asyncio.to_thread(entered.wait, 30)
    for answer in answers[1:]:
        answer.cancel()
    await asyncio.sleep(0.05)
    assert not ended.is_set(), "somebody waits"
    answers[0].cancel()
    assert await asyncio.to_thread(ended.wait, 20)


async def test_what_is_given_up_before_it_is_sent_is_not_sent(running: Running, batches: Batches) -> None:
    with batches.together():
        batches.add(item()).cancel()
    await asyncio.sleep(0.05)
    assert running.fake.methods == ["GetModel"]
