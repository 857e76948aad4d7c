"""Channels and RPCs of the asyncio client. `calls.py` is the same for threads."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, closing, suppress

import grpc.aio

from vitwire._delivery.answers import Answer
from vitwire._delivery.nixl import ROOM_SECONDS
from vitwire._transport import channel as grpc_channel
from vitwire._transport.calls import Calls, Transport
from vitwire._transport.connections import Connection, Connections
from vitwire._transport.context import Context, Metadata
from vitwire._transport.deadline import Deadline
from vitwire._transport.diagnosis import diagnosed
from vitwire._transport.exchange import Exchange, model_of
from vitwire._transport.protocol import Part
from vitwire._transport.retry import Attempts
from vitwire._transport.slots import AsyncSlots
from vitwire.errors import EncodeFailed, Unavailable, VitwireError, from_rpc, is_from_server
from vitwire.model import Model
from vitwire.v1 import encoder_pb2 as pb


class AsyncTransport:
    """Sends the messages of `protocol`. No types or errors of gRPC leave this class."""

    def __init__(self, channels: grpc_channel.Channels, connections: int, max_in_flight: int | None = None) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop that first used the client; channels belong to it."""
        self.slots = AsyncSlots(max_in_flight)
        """Of requests; the caller of `encode` holds one."""
        self._security = channels.security
        self._threaded = Transport(channels, connections)
        self._connections: Connections[grpc.aio.Channel] = Connections(channels.open_async, connections)
        self.replicas = self._threaded.replicas

    async def encode(
        self, parts: Sequence[Part], levels: int, deadline: Deadline, context: Context
    ) -> AsyncGenerator[Answer, None]:
        """Results of all parts as they arrive; the calls are cancelled when the generator is closed."""
        self._check_loop()
        one = self._connections.common(parts, stream=False)
        stream = self._threaded.common(parts, stream=True)
        exchanges = [Exchange(part, levels, Attempts(context.policy, deadline), context.request_id) for part in parts]
        streams = [self._results(exchange, context.metadata, one, stream) for exchange in exchanges]
        async with aclosing(streams[0] if len(streams) == 1 else _merged(streams)) as results:
            async for result in results:
                yield result

    async def model(self, deadline: Deadline, context: Context) -> Model:
        self._check_loop()
        get_model = self._connections.control(grpc_channel.OPTIONS).unary_unary(*grpc_channel.GET_MODEL)
        attempts = Attempts(context.policy, deadline)
        while True:
            accept_timeout = attempts.accept_timeout()
            try:
                timeout = attempts.left() if accept_timeout is None else accept_timeout
                return model_of(await get_model(pb.GetModelRequest(), timeout=timeout, metadata=context.metadata))
            except grpc.RpcError as error:
                if accept_timeout is not None and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    attempts.unanswered()
                    continue
                delay = attempts.delay(await self._with_reason(error, attempts, context.metadata))
            await asyncio.sleep(delay)

    async def health(self, service: str, deadline: Deadline, context: Context) -> str:
        self._check_loop()
        check = self._connections.control(grpc_channel.HEALTH_OPTIONS).unary_unary(*grpc_channel.HEALTH)
        try:
            status = await check(service, timeout=deadline.left(), metadata=context.metadata)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return "SERVICE_UNKNOWN"
            raise await asyncio.to_thread(diagnosed, from_rpc(error), self._security) from None
        return grpc_channel.health_name(status)

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
        if exchange.part.one_message:
            with closing(exchange):  # also of an attempt that is never sent
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
                    delay = exchange.failed(
                        await self._with_reason(error, exchange.attempts, metadata, part), connection
                    )
                except asyncio.CancelledError as error:
                    raise _cancelled(error) from None
                finally:
                    call.cancel()
                    exchange.close()
            again = None
            if delay is None:
                for result in exchange.refused():
                    yield result
                return
            await asyncio.sleep(delay)

    async def _with_reason(
        self, error: grpc.RpcError, attempts: Attempts, metadata: Metadata, part: Part | None = None
    ) -> VitwireError:
        """The error; if gRPC only reports that no server is ready, what that means, or the reason of a server."""
        failure = from_rpc(error, part.indices if part else ())
        if not isinstance(failure, Unavailable) or is_from_server(error):
            return failure
        if (meaning := await asyncio.to_thread(diagnosed, failure, self._security)) is not failure:
            return meaning
        if attempts.needs_reason():
            attempts.reason = await self._reason(attempts.reason, metadata)
        return attempts.reason or failure

    async def _reason(self, known: VitwireError | None, metadata: Metadata) -> VitwireError | None:
        """Why no server is ready: None if one is ready, `known` if none answers."""
        get_model = self._connections.control(grpc_channel.HEALTH_OPTIONS).unary_unary(*grpc_channel.GET_MODEL)
        try:
            await get_model(pb.GetModelRequest(), timeout=grpc_channel.REASON_SECONDS, metadata=metadata)
        except grpc.RpcError as error:
            return from_rpc(error) if error.code() is grpc.StatusCode.UNAVAILABLE else known
        return None

    async def _streamed(
        self, exchange: Exchange, metadata: Metadata, again: Connection[grpc.Channel] | None
    ) -> AsyncGenerator[Answer, None]:
        """Results of a part that is sent as a stream, by a thread.

        grpc.aio 1.85 loses the status of an RPC that the server ends while the client is still sending.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Answer | Exception | None] = asyncio.Queue()
        calls = Calls()

        def deliver(result: Answer | Exception | None) -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(arrived.put_nowait, result)

        def drain() -> None:
            try:
                for result in self._threaded.results(exchange, metadata, calls, again):
                    deliver(result)
                deliver(None)
            except Exception as error:  # noqa: BLE001  # raised again by the caller
                deliver(error)

        threading.Thread(target=drain, daemon=True).start()
        try:
            while (result := await arrived.get()) is not None:
                if isinstance(result, Exception):
                    raise result
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
    """Whether the server accepted or ended the call within `timeout`."""
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


async def _merged(streams: Sequence[AsyncGenerator[Answer, None]]) -> AsyncGenerator[Answer, None]:
    """Results of all streams as they arrive."""
    arrived: asyncio.Queue[Answer | Exception | None] = asyncio.Queue()

    async def drain(stream: AsyncGenerator[Answer, None]) -> None:
        try:
            async for result in stream:
                arrived.put_nowait(result)
            arrived.put_nowait(None)
        except Exception as error:  # noqa: BLE001  # raised again by the caller
            arrived.put_nowait(error)

    tasks = [asyncio.create_task(drain(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            result = await arrived.get()
            if isinstance(result, Exception):
                raise result
            if result is None:
                running -= 1
            else:
                yield result
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
