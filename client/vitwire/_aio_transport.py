"""Channels and RPCs of the client for asyncio. `_transport.py` holds its twin for threads."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress

import grpc.aio

from vitwire import _channel
from vitwire._channel import Backoff, Deadline, Metadata
from vitwire._errors import EncodeFailed, from_rpc
from vitwire._model import Model
from vitwire._protocol import Assembler, Part, Result
from vitwire._transport import Calls, Transport
from vitwire.v1 import encoder_pb2 as pb


class AsyncTransport:
    """Moves the messages of `_protocol`; nothing of gRPC leaves it."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None, token: str | None) -> None:
        self._target = target
        self._credentials = credentials
        self._token = token
        self._closed = False
        self._threaded = Transport(target, credentials, token)
        self._channels: dict[_channel.ChannelOptions, grpc.aio.Channel] = {}

    async def encode(self, parts: Sequence[Part], levels: int, deadline: Deadline) -> AsyncGenerator[Result, None]:
        """Results of all parts as they come; the calls are cancelled when the generator is closed."""
        metadata = _channel.metadata(self._token)
        streams = [
            (self._results if part.one_message else self._streamed)(part, levels, deadline, metadata) for part in parts
        ]
        async with aclosing(streams[0] if len(streams) == 1 else _merged(streams)) as results:
            async for result in results:
                yield result

    async def model(self, deadline: Deadline) -> Model:
        get_model = self._connected(_channel.OPTIONS).unary_unary(*_channel.GET_MODEL)
        metadata = _channel.metadata(self._token)
        backoff = Backoff()
        while True:
            try:
                message = await get_model(pb.GetModelRequest(), timeout=deadline.left(), metadata=metadata)
                return Model.from_message(message)
            except grpc.RpcError as error:
                delay = backoff.delay(error)
                if delay is None:
                    raise from_rpc(error) from None
            except ValueError as error:
                raise EncodeFailed(f"the server describes its model wrongly: {error}") from None
            await asyncio.sleep(deadline.bound(delay))

    async def health(self, service: str, timeout: float | None) -> str:  # noqa: ASYNC109  # the RPC's deadline
        check = self._connected(_channel.HEALTH_OPTIONS).unary_unary(*_channel.HEALTH)
        try:
            status = await check(service, timeout=timeout, metadata=_channel.metadata(self._token))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return "SERVICE_UNKNOWN"
            raise from_rpc(error) from None
        return _channel.health_name(status)

    async def close(self) -> None:
        self._closed = True
        await asyncio.to_thread(self._threaded.close)
        for channel in self._channels.values():
            await channel.close()

    async def _results(
        self, part: Part, levels: int, deadline: Deadline, metadata: Metadata
    ) -> AsyncGenerator[Result, None]:
        """Results of a part that is one message; one that was refused before anything was answered is sent again."""
        encode = self._connected(_channel.OPTIONS).unary_stream(*_channel.ENCODE)
        backoff = Backoff()
        while True:
            call = encode(part.request(), timeout=deadline.left(), metadata=metadata)
            assembler, answered = Assembler(part.indices, levels), False
            try:
                async for response in call:
                    answered = True
                    if (result := assembler.feed(response)) is not None:
                        yield result
                assembler.finish()
                return
            except grpc.RpcError as error:
                delay = backoff.delay(error, answered=answered)
                if delay is None:
                    raise from_rpc(error, part.indices) from None
            except asyncio.CancelledError:
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise
                raise EncodeFailed("the client was closed during the call", code="CANCELLED") from None
            finally:
                call.cancel()
            await asyncio.sleep(deadline.bound(delay))

    async def _streamed(
        self, part: Part, levels: int, deadline: Deadline, metadata: Metadata
    ) -> AsyncGenerator[Result, None]:
        """Results of a part that is sent as a stream, by a thread.

        grpc.aio 1.85 loses the status of an RPC that the server ends while the client is still sending.
        """
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Result | Exception | None] = asyncio.Queue()
        calls = Calls()

        def tell(result: Result | Exception | None) -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                loop.call_soon_threadsafe(arrived.put_nowait, result)

        def drain() -> None:
            try:
                for result in self._threaded.results(part, levels, deadline, metadata, calls):
                    tell(result)
                tell(None)
            except Exception as error:  # noqa: BLE001  # whatever it is, the caller waits for it
                tell(error)

        threading.Thread(target=drain, daemon=True).start()
        try:
            while (result := await arrived.get()) is not None:
                if isinstance(result, Exception):
                    raise result
                yield result
        finally:
            calls.cancel()

    def _connected(self, options: _channel.ChannelOptions) -> grpc.aio.Channel:
        """The channel with these options; opened late, as it belongs to the running loop."""
        if self._closed:
            raise RuntimeError("the client is closed")
        if options not in self._channels:
            self._channels[options] = self._open(options)
        return self._channels[options]

    def _open(self, options: _channel.ChannelOptions) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._target, options)
        return grpc.aio.secure_channel(self._target, self._credentials, options)


async def _merged(streams: Sequence[AsyncGenerator[Result, None]]) -> AsyncGenerator[Result, None]:
    """Results of all streams as they come."""
    arrived: asyncio.Queue[Result | Exception | None] = asyncio.Queue()

    async def drain(stream: AsyncGenerator[Result, None]) -> None:
        try:
            async for result in stream:
                arrived.put_nowait(result)
            arrived.put_nowait(None)
        except Exception as error:  # noqa: BLE001  # whatever it is, the caller waits for it
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
