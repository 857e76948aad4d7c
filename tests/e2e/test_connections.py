"""Several connections of one client, and results while items upload, against a real server."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from both_clients import Call, both
from certificates import Authority
from checkpoints import Checkpoints
from entered import entered
from servers import PIXELS_ONLY, ServerProcess, serving
from vitwire import Item

COLUMNS = 3 * 2 * 14 * 14
TOKEN = "alice-0123456789abcdef"
LIMIT = 3
FLAGS = ("--dtype", "float32", *PIXELS_ONLY)

on_socket = entered(
    lambda checkpoints, unix_socket: serving(checkpoints("qwen2_vl"), *FLAGS, f"--unix-socket={unix_socket}")
)


@pytest.fixture(scope="module")
def secured(checkpoints: Checkpoints, authority: Authority) -> Iterator[ServerProcess]:
    """With TLS and a token."""
    tokens = authority.folder / "tokens"
    tokens.write_text(f"{TOKEN} alice\n")
    flags = ("--tls-cert", authority.cert, "--tls-key", authority.key, "--auth-tokens-file", tokens)
    with serving(checkpoints("qwen2_vl"), *FLAGS, *map(str, flags)) as process:
        yield process


def item(rows: int = 16, value: float = 1.0) -> Item:
    return Item(np.full((rows, COLUMNS), value, np.float32), (1, rows // 2, 2))


def established(port: int) -> int:
    """This process's connections to the port."""
    connections = psutil.Process().net_connections("tcp")
    return sum(each.status == "ESTABLISHED" and each.raddr.port == port for each in connections)


@both
@pytest.mark.parametrize("rows", [16, 1024], ids=["Encode", "EncodeStream"])
async def test_concurrent_calls_with_tls_and_a_token(
    make: Call, rows: int, secured: ServerProcess, authority: Authority
) -> None:
    options = {"tls": authority.credentials(), "token": TOKEN, "timeout": 120, "connections": LIMIT}
    async with make(secured.target, **options) as client:
        alone = [(await client.encode([item(rows, value)]))[0].numpy() for value in (0.0, 1.0)]
        calls = [client.encode([item(rows, index % 2)]) for index in range(16)]
        for index, (embedding,) in enumerate(await asyncio.gather(*calls)):
            np.testing.assert_allclose(embedding.numpy(), alone[index % 2], atol=1e-4)
        assert 1 < established(secured.port) <= 1 + LIMIT


@both
@pytest.mark.usefixtures("on_socket")
async def test_concurrent_calls_over_a_unix_socket(make: Call, unix_socket: Path) -> None:
    async with make(f"unix:{unix_socket}", timeout=120, connections=LIMIT) as client:
        sizes = [16, 1024] * 6
        found = await asyncio.gather(*(client.encode([item(rows)]) for rows in sizes))
        assert [each.shape[0] for (each,) in found] == [rows // 4 for rows in sizes]
        assert await client.health() == "SERVING"


@both
@pytest.mark.usefixtures("on_socket")
async def test_results_are_yielded_while_later_items_are_still_read(make: Call, unix_socket: Path) -> None:
    """The second item exists only once the first result was yielded, the third, a stream, once the second was."""
    yielded = threading.Semaphore(1)

    def items() -> Iterator[Item]:
        for rows in (16, 32, 1024):
            assert yielded.acquire(timeout=60)
            yield item(rows)

    async with make(f"unix:{unix_socket}", timeout=120) as client:
        found = []
        async for index, embedding in client.iter_encode(items()):
            found.append((index, embedding.shape[0]))
            yielded.release()
    assert found == [(0, 4), (1, 8), (2, 256)]
