"""Channels and RPCs of the asyncio client. `calls.py` is the same for threads."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, closing
from functools import partial
from typing import TypeVar

import grpc.aio

from vitwire._delivery.answers import Answer
from vitwire._delivery.nixl import ROOM_SECONDS
from vitwire._transport import channel as grpc_channel
from vitwire._transport.arrivals import AsyncArrivals, merged_async
from vitwire._transport.attempts import Attempts, Deadline
from vitwire._transport.calls import Calls, Transport
from vitwire._transport.channel import Channels
from vitwire._transport.connections import Connection, Connections
from vitwire._transport.context import Context, Metadata
from vitwire._transport.exchange import Exchange
from vitwire._transport.protocol import Part
from vitwire._transport.slots import AsyncSlots
from vitwire.errors import EncodeFailed
from vitwire.model import Model

T = TypeVar("T")


class AsyncTransport:
    """Sends the messages of `protocol`. No types or errors of gRPC leave this class."""

    def __init__(self, channels: Channels, connections: int, max_in_flight: int | None = None) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop that first used the client; channels belong to it."""
        self.slots = AsyncSlots(max_in_flight)
        """Limits requests in flight; the caller of `encode` holds one."""
        self._threaded = Transport(channels, connections)
        self._connections: Connections[grpc.aio.Channel] = Connections(channels.open_async, connections)
        self.replicas = self._threaded.replicas

    async def encode(self, parts: Sequence[Part], deadline: Deadline, context: Context) -> AsyncGenerator[Answer, None]:
        """Results of all parts as they arrive; the calls are cancelled when the generator is closed."""
        self._check_loop()
        one = self._connections.common(parts, stream=False)
        stream = self._threaded.connections.common(parts, stream=True)
        exchanges = [Exchange(part, Attempts(context.policy, deadline), context.request_id) for part in parts]
        streams = [self._results(exchange, context.metadata, one, stream) for exchange in exchanges]
        async with aclosing(streams[0] if len(streams) == 1 else merged_async(streams)) as results:
            async for result in results:
                yield result

    async def model(self, deadline: Deadline, context: Context) -> Model:
        self._check_loop()
        return await _in_thread(lambda calls: self._threaded.model(deadline, context, calls))

    async def health(self, service: str, deadline: Deadline, context: Context) -> str:
        self._check_loop()
        return await _in_thread(lambda _: self._threaded.health(service, deadline, context))

    async def close(self) -> None:
        channels = self._connections.close()
        await asyncio.to_thread(self._threaded.close)
        for channel in channels:
            await channel.close()

    async def _results(
        self,
        exchange: Exchange,
        metadata: Metadata,
        one: Connection[grpc.aio.Channel] | None,
        stream: Connection[grpc.Channel] | None,
    ) -> AsyncGenerator[Answer, None]:
        """Results of a part: sent as one message while it is one, and then as a stream.

        one, stream: connections of the first attempts.
        """
        async with aclosing(self._in_one_message(exchange, metadata, one)) as results:
            async for result in results:
                yield result
        if not exchange.part.one_message:
            async with aclosing(self._streamed(exchange, metadata, stream)) as results:
                async for result in results:
                    yield result

    async def _in_one_message(
        self, exchange: Exchange, metadata: Metadata, again: Connection[grpc.aio.Channel] | None
    ) -> AsyncGenerator[Answer, None]:
        """Results of a part; what a server refused or never answered is sent again, while it is one message."""
        while exchange.part.one_message:
            with closing(exchange):
                await _begun(exchange)
                accept_timeout, part = exchange.attempts.accept_timeout(), exchange.part
                with self._connections.bulk(
                    part.transfer_bytes, stream=False, routed=exchange.is_routed, again=again
                ) as connection:
                    encode = connection.channel.unary_stream(*grpc_channel.ENCODE)
                    left = exchange.attempts.left()
                    call = encode(part.request(), timeout=left, metadata=exchange.metadata(metadata))
                    try:
                        if not await _accepted(call, accept_timeout):
                            again = exchange.unanswered(connection)
                            continue
                        async for response in call:
                            if (result := exchange.feed(response)) is not None:
                                yield result
                        self.replicas.saw(await call.trailing_metadata())
                        delay = exchange.finish()
                    except grpc.RpcError as error:
                        if exchange.is_complete:
                            return
                        reason = partial(self._threaded.with_reason, error, exchange.attempts, metadata, part)
                        delay = exchange.failed(await asyncio.to_thread(reason), connection)
                    except asyncio.CancelledError as error:
                        raise _cancelled(error) from None
                    finally:
                        call.cancel()
            again = None
            if delay is None:
                for result in exchange.refused():
                    yield result
                return
            await asyncio.sleep(delay)

    async def _streamed(
        self, exchange: Exchange, metadata: Metadata, again: Connection[grpc.Channel] | None
    ) -> AsyncGenerator[Answer, None]:
        """Results of a part that is sent as a stream, by a thread.

        grpc.aio 1.85 loses the status of an RPC that the server ends while the client is still sending.
        """
        calls, arrivals = Calls(), AsyncArrivals[Answer]()
        arrivals.start_thread(self._threaded.results(exchange, metadata, calls, again))
        try:
            while (result := await arrivals.next()) is not None:
                yield result
        finally:
            calls.cancel()

    def _check_loop(self) -> None:
        """Raises RuntimeError in another event loop than the first; gRPC would wait without end."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError("the client was used in another event loop; make a client in each event loop")


async def _accepted(call: grpc.aio.Call, timeout: float | None) -> bool:  # noqa: ASYNC109  # shorter than the call's
    """Wait until the server accepts or ends the call; False if `timeout` passed first."""
    if timeout is None:
        return True
    try:
        async with asyncio.timeout(timeout):
            await call.initial_metadata()
    except TimeoutError:
        return False
    return True


async def _begun(exchange: Exchange) -> None:
    """Start an attempt, once there is room for its rows."""
    while not exchange.begin():
        exchange.check_deadline()
        await asyncio.sleep(ROOM_SECONDS)


def _cancelled(error: asyncio.CancelledError) -> BaseException:
    """The error itself if this task was cancelled; else the client was closed, and only its calls were cancelled."""
    if (task := asyncio.current_task()) is not None and task.cancelling():
        return error
    return EncodeFailed("the client was closed during the call", code="CANCELLED")


async def _in_thread(function: Callable[[Calls], T]) -> T:
    """The result of a function, which gives up soon after its calls are cancelled; nothing waits for it then."""
    calls, arrivals = Calls(), AsyncArrivals[T]()
    arrivals.start_thread(map(function, [calls]))
    try:
        result = await arrivals.next()
    finally:
        calls.cancel()
    assert result is not None, "functions return something"
    return result
