"""Responses over a real connection: headers are sent alone only if an answer takes long; stalled writes end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from vitwire_server.observe.metrics import Metrics
from vitwire_server.rpc.grpc_types import Context, RpcHandler
from vitwire_server.rpc.response_messages import Outgoing
from vitwire_server.rpc.response_writer import PendingWrites, ResponseWriter

ASKS = grpc.aio.Metadata(("x-vitwire-acknowledge", "1"))
ROWS = Outgoing(b"rows", 4, last=True)
Call = grpc.aio.UnaryStreamCall[bytes, bytes]


@asynccontextmanager
async def calling(
    answer: Callable[[ResponseWriter], Awaitable[None]], asks: grpc.aio.Metadata | None = ASKS
) -> AsyncIterator[Call]:
    """A call of a server that answers so."""

    async def serve(_: bytes, context: Context) -> None:
        async with ResponseWriter(context, PendingWrites(30), Metrics().rpc) as writer:
            await answer(writer)

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

    async def answer(writer: ResponseWriter) -> None:
        await acknowledged.wait()
        await writer.write(ROWS)

    async with calling(answer) as call:
        await call.initial_metadata()
        acknowledged.set()
        assert [message async for message in call] == [b"rows"]


async def test_headers_of_others_come_with_the_answer() -> None:
    ended = asyncio.Event()

    async def answer(writer: ResponseWriter) -> None:
        await ended.wait()
        await writer.write(ROWS)

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

    async def answer(writer: ResponseWriter) -> None:
        await asyncio.sleep(seconds)
        await writer.write(ROWS)

    async def nothing(_: ResponseWriter) -> None:
        await asyncio.sleep(seconds)

    async with calling(answer) as call:
        assert [message async for message in call] == [b"rows"]
        assert await call.code() is grpc.StatusCode.OK
    async with calling(nothing) as call:
        assert [message async for message in call] == []
        assert await call.code() is grpc.StatusCode.OK


async def never() -> None:
    await asyncio.Event().wait()


async def outcome(writes: PendingWrites, write: Awaitable[None]) -> str:
    try:
        await writes.complete(write)
    except TimeoutError:
        return "stalled"
    return "written"


async def test_a_write_that_stalls_is_ended() -> None:
    writes = PendingWrites(0.05)
    assert await outcome(writes, never()) == "stalled"
    assert await outcome(writes, asyncio.sleep(0)) == "written", "the task itself was not cancelled"


async def test_each_write_has_its_own_time() -> None:
    """Writes of one RPC that together take longer than one may, beside writes that stall."""
    writes = PendingWrites(1.0)

    async def steady() -> list[str]:
        return [await outcome(writes, asyncio.sleep(0.04)) for _ in range(30)]

    stalled = [asyncio.create_task(outcome(writes, never())) for _ in range(3)]
    assert await steady() == ["written"] * 30
    later = asyncio.create_task(outcome(writes, never()))
    assert await asyncio.gather(*stalled, later) == ["stalled"] * 4


async def test_a_cancelled_rpc_stays_cancelled() -> None:
    writes = PendingWrites(0.05)
    task = asyncio.create_task(outcome(writes, never()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.1)
    assert await outcome(writes, never()) == "stalled", "the timer serves later writes too"


async def test_a_failed_write_raises_its_own_error() -> None:
    writes = PendingWrites(60)

    async def broken() -> None:
        raise EOFError

    with pytest.raises(EOFError):
        await writes.complete(broken())
    assert await outcome(writes, asyncio.sleep(0)) == "written"
