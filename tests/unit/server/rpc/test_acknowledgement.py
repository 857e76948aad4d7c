"""Response headers are sent alone only where an answer takes long; over a real connection."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from vitwire_server.rpc.acknowledgement import Acknowledgement
from vitwire_server.rpc.grpc_types import Context, RpcHandler

ASKS = grpc.aio.Metadata(("x-vitwire-acknowledge", "1"))
Call = grpc.aio.UnaryStreamCall[bytes, bytes]


@asynccontextmanager
async def calling(
    answer: Callable[[Context, Acknowledgement], Awaitable[None]], asks: grpc.aio.Metadata | None = ASKS
) -> AsyncIterator[Call]:
    """A call of a server that answers so."""

    async def serve(_: bytes, context: Context) -> None:
        async with Acknowledgement(context) as acknowledgement:
            await answer(context, acknowledgement)

    server = grpc.aio.server()
    handler: RpcHandler = grpc.unary_stream_rpc_method_handler(serve)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Answer": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/test/Answer")
            yield method(b"", metadata=asks, timeout=30)
    finally:
        await server.stop(0)


async def test_a_long_answer_is_acknowledged_before_it_comes() -> None:
    acknowledged = asyncio.Event()

    async def answer(context: Context, acknowledgement: Acknowledgement) -> None:
        await acknowledged.wait()
        await acknowledgement.settle()
        await context.write(b"rows")

    async with calling(answer) as call:
        await call.initial_metadata()
        acknowledged.set()
        assert [message async for message in call] == [b"rows"]


async def test_headers_of_others_come_with_the_answer() -> None:
    ended = asyncio.Event()

    async def answer(context: Context, acknowledgement: Acknowledgement) -> None:
        await ended.wait()
        await acknowledgement.settle()
        await context.write(b"rows")

    async with calling(answer, asks=None) as call:
        headers = asyncio.ensure_future(call.initial_metadata())
        done, _ = await asyncio.wait([headers], timeout=0.3)
        assert not done
        ended.set()
        assert [message async for message in call] == [b"rows"]
        await headers


@pytest.mark.parametrize("seconds", [0.0, 0.099, 0.1, 0.101, 0.15])
async def test_headers_never_collide_with_an_answer_or_a_status(seconds: float) -> None:
    """gRPC refuses headers that are sent twice; the timer for them is due after 0.1 s."""

    async def answer(context: Context, acknowledgement: Acknowledgement) -> None:
        await asyncio.sleep(seconds)
        await acknowledgement.settle()
        await context.write(b"rows")

    async def nothing(context: Context, acknowledgement: Acknowledgement) -> None:
        await asyncio.sleep(seconds)

    async with calling(answer) as call:
        assert [message async for message in call] == [b"rows"]
        assert await call.code() is grpc.StatusCode.OK
    async with calling(nothing) as call:
        assert [message async for message in call] == []
        assert await call.code() is grpc.StatusCode.OK
