"""Requests of the router to an engine over a real socket: rows are encoded while they are sent."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress

import numpy as np
import pytest

from vitwire.integrations.vllm.tensors import TorchFile, torch_base64
from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.gateway_settings import RouterSettings
from vitwire_gateway.requests.filling import Filled, filled
from vitwire_gateway.router.llm_engine import Engine

Answering = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
ROWS = np.random.default_rng(0).integers(0, 1 << 16, (1024, 4096), dtype="<u2")


def request() -> Filled:
    """11 MB, more than a connection holds."""
    return filled([b'{"messages":[{', b"}]}"], [{"type": "image_embeds", "rows": TorchFile(ROWS, "bfloat16")}])


async def status_of(answering: Answering, body: Filled) -> int:
    ended = asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answering(reader, writer)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
            ended.set()

    server = await asyncio.start_server(connected, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    engine = Engine(RouterSettings(engine_url=f"http://127.0.0.1:{port}"))
    try:
        async with engine.send("POST", b"/v1/chat/completions", [], body) as response:
            return response.status_code
    finally:
        await engine.close()
        await ended.wait()
        server.close()
        await server.wait_closed()


async def head_of(reader: asyncio.StreamReader) -> dict[str, str]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()[1:-1]
    return dict(line.split(": ", 1) for line in lines)


async def answer(writer: asyncio.StreamWriter, status: bytes) -> None:
    writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
    await writer.drain()


def test_the_engine_gets_the_whole_request_and_its_length() -> None:
    read: list[bytes] = []

    async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await head_of(reader)
        assert "transfer-encoding" not in head
        read.append(await reader.readexactly(int(head["content-length"])))
        await answer(writer, b"200 OK")

    assert asyncio.run(status_of(answering, request())) == 200
    (part,) = json.loads(read[0])["messages"]
    assert part["rows"] == torch_base64(ROWS, "bfloat16")


def test_other_tasks_run_while_rows_are_sent() -> None:
    turns = 0

    async def counting() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal turns
        head = await head_of(reader)
        turns = 0
        await reader.readexactly(int(head["content-length"]))
        await answer(writer, b"200 OK")

    async def both() -> int:
        task = asyncio.create_task(counting())
        try:
            return await status_of(answering, request())
        finally:
            task.cancel()

    assert asyncio.run(both()) == 200
    assert turns >= len(list(request()))


def test_an_engine_that_closes_within_the_request_ends_it() -> None:
    async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.transport.abort()

    with pytest.raises(ApiError) as caught:
        asyncio.run(status_of(answering, request()))
    assert (caught.value.status, caught.value.code) == (502, "engine_failed")


def test_an_engine_may_refuse_before_it_has_read_the_request() -> None:
    async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head_of(reader)
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        while await reader.read(1 << 20):
            pass

    assert asyncio.run(status_of(answering, request())) == 413
