"""Files of one client beside a flood of another's, through real servers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from checkpoints import Checkpoints
from encoded_files import jpeg_of_size, photograph, saved
from servers import ServerProcess, serving
from vitwire import AsyncClient, Embedding, Item, Overloaded

FLOOD = 60
SHAPES = {"one process": (), "edges": ("--rpc-processes", "2")}
DECODERS = ("--dtype", "float32", "--decode-processes", "1")
Task = asyncio.Task[list[Embedding]]


@asynccontextmanager
async def flooded(server: ServerProcess, files: int = FLOOD, token: str | None = None) -> AsyncIterator[list[Task]]:
    """A client's files of 2 KB that take long to decode, in a request each; nothing of them is left afterwards."""
    async with AsyncClient(server.target, token=token, timeout=600, max_retries=0) as client:
        items = [Item(encoded=jpeg_of_size(2500, 2500) + bytes([number])) for number in range(files)]
        tasks = [asyncio.create_task(client.encode([item])) for item in items]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            while server.metric("vitwire_decode_waiting") < FLOOD // 2:  # noqa: ASYNC110 - until all have arrived
                await asyncio.sleep(0.05)
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    while server.metric("vitwire_decode_waiting") + server.metric("vitwire_admitted_items"):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    "shape", [each if "edges" in each else pytest.param(each, marks=pytest.mark.matrix) for each in SHAPES]
)
async def test_a_flood_of_slow_files_delays_others_by_a_few_decodes(checkpoints: Checkpoints, shape: str) -> None:
    with serving(checkpoints("siglip_vision_model"), *DECODERS, *SHAPES[shape]) as server:
        async with flooded(server) as flood:
            for quality in (70, 71, 72):
                async with AsyncClient(server.target, timeout=600) as other:
                    await other.encode([Item(encoded=saved(photograph(), quality=quality))])
            assert sum(task.done() for task in flood) < FLOOD // 2


async def test_the_files_of_a_caller_leave_room_for_others(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Of 80 files that the server may hold, a caller has 60."""
    tokens = tmp_path / "tokens"
    tokens.write_text("the-first-long-token one\nthe-second-long-token two\n")
    tokens.chmod(0o600)
    flags = (*DECODERS, "--max-queued-items", "80", "--auth-tokens-file", str(tokens))
    with serving(checkpoints("siglip_vision_model"), *flags) as server:
        async with (
            flooded(server, 80, "the-first-long-token") as flood,
            AsyncClient(server.target, timeout=600, token="the-second-long-token") as two,
        ):
            await two.encode([Item(encoded=saved(photograph()))])
            refused = [task for task in flood if task.done() and task.exception()]
            encoded = sum(task.done() for task in flood) - len(refused)  # before all had come, on a slow machine
            assert 0 < 20 - encoded <= len(refused) <= 20
            assert all(isinstance(task.exception(), Overloaded) for task in refused)
