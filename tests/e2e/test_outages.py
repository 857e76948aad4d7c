"""What a client sees of servers that freeze, come back, or are still loading."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import Checkpoints
from processes import frozen
from servers import PIXELS_ONLY, ServerProcess, serving
from vitwire import AsyncClient, Client, Item, Unavailable

SMALL = Item(np.ones((16, 3 * 2 * 14 * 14), np.float32), (1, 4, 4))
LARGE = Item(np.ones((1024, 3 * 2 * 14 * 14), np.float32), (1, 32, 32))
"""More than fits into one message."""
TIMEOUT = 12.0
Encode = Callable[[Item], Awaitable[Any]]


@pytest.fixture(scope="module")
def pair(checkpoints: Checkpoints) -> Iterator[list[ServerProcess]]:
    with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY) as one, serving(checkpoints("qwen2_vl"), *PIXELS_ONLY) as other:
        yield [one, other]


def both(pair: list[ServerProcess]) -> str:
    return "ipv4:" + ",".join(server.target for server in pair)


async def until_shared(encode: Encode, item: Item, pair: list[ServerProcess]) -> None:
    """Each method's connections are made in their own time."""
    before, deadline = [each.metric("vitwire_items_total") for each in pair], time.monotonic() + 60
    while any(each.metric("vitwire_items_total") <= then for each, then in zip(pair, before, strict=True)):
        assert time.monotonic() < deadline
        await encode(item)


@pytest.mark.parametrize(("kind", "item"), [(Client, SMALL), (Client, LARGE), (AsyncClient, SMALL)])
async def test_a_frozen_replica_fails_no_sequential_call(
    kind: type[Client | AsyncClient], item: Item, pair: list[ServerProcess]
) -> None:
    client = kind(both(pair), timeout=TIMEOUT)

    async def encode(item: Item) -> None:
        if isinstance(client, Client):
            await asyncio.to_thread(client.encode, [item])
        else:
            await client.encode([item])

    try:
        await until_shared(encode, item, pair)
        with frozen(pair[0]):
            for _ in range(12):
                await encode(item)
        await until_shared(encode, item, pair)
    finally:
        await asyncio.to_thread(client.close) if isinstance(client, Client) else await client.close()


@pytest.mark.matrix
def test_content_of_a_frozen_replica_is_encoded_by_another(pair: list[ServerProcess]) -> None:
    with Client(both(pair), timeout=TIMEOUT, affinity=True) as client:
        named = [replace(SMALL, content_id=str(number)) for number in range(12)]
        before = [each.metric("vitwire_items_total") for each in pair]
        client.encode(named)
        assert all(each.metric("vitwire_items_total") > then for each, then in zip(pair, before, strict=True))
        with frozen(pair[0]):
            for item in named[:6]:
                client.encode([item])
        client.encode(named)


def test_a_frozen_server_is_found_without_a_timeout(pair: list[ServerProcess]) -> None:
    with Client(pair[0].target, timeout=float("inf"), max_retries=0) as client:
        client.encode([SMALL])
        begun = time.monotonic()
        with frozen(pair[0]), pytest.raises(Unavailable):
            client.encode([SMALL])
        assert time.monotonic() - begun < 40, "keepalive takes 20 s"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_waiting_for_a_server_that_is_not_there_yet(
    kind: type[Client | AsyncClient], checkpoints: Checkpoints
) -> None:
    port = free_port()
    client = kind(f"127.0.0.1:{port}", timeout=120, wait_for_ready=True)

    async def encode() -> None:
        await (asyncio.to_thread(client.encode, [SMALL]) if isinstance(client, Client) else client.encode([SMALL]))

    call = asyncio.create_task(encode())
    await asyncio.sleep(3)
    assert not call.done(), "longer than retries take"
    with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, "--port", str(port)):
        await call
    await asyncio.to_thread(client.close) if isinstance(client, Client) else await client.close()


@pytest.mark.parametrize("kind", [Client, pytest.param(AsyncClient, marks=pytest.mark.matrix)])
async def test_a_timeout_says_that_the_server_is_loading(
    kind: type[Client | AsyncClient], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    fault = tmp_path / "fault"
    fault.write_text("hang")  # in the forward that warms the engine up
    program = (str(Path(__file__).parents[1] / "support" / "faulty_server.py"), str(fault))
    with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, wait=False, program=program) as server:
        client = kind(server.target, timeout=8, wait_for_ready=True)
        with pytest.raises(Unavailable, match="still loading"):
            await (asyncio.to_thread(client.encode, [SMALL]) if isinstance(client, Client) else client.encode([SMALL]))
        fault.write_text("")
        await (
            client.encode([SMALL], timeout=60)
            if isinstance(client, AsyncClient)
            else asyncio.to_thread(client.model, 60)
        )
        await asyncio.to_thread(client.close) if isinstance(client, Client) else await client.close()
