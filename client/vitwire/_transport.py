"""Channels and RPCs of the client for threads. `_aio_transport.py` holds its twin for asyncio."""

import threading
import time
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import grpc

from vitwire import _channel
from vitwire._channel import Backoff, Deadline, Metadata
from vitwire._errors import EncodeFailed, from_rpc
from vitwire._model import Model
from vitwire._protocol import Assembler, Part, Result
from vitwire.v1 import encoder_pb2 as pb


class Transport:
    """Moves the messages of `_protocol`; nothing of gRPC leaves it."""

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None, token: str | None) -> None:
        self._target = target
        self._credentials = credentials
        self._token = token
        self._lock = threading.Lock()
        self._closed = False
        self._channels: dict[_channel.ChannelOptions, grpc.Channel] = {}

    def encode(self, parts: Sequence[Part], levels: int, deadline: Deadline) -> Iterator[Result]:
        """Results of all parts as they come; the calls are cancelled when the iterator is closed."""
        metadata = _channel.metadata(self._token)
        calls = Calls()
        streams = [self.results(part, levels, deadline, metadata, calls) for part in parts]
        try:
            yield from streams[0] if len(streams) == 1 else _merged(streams)
        finally:
            calls.cancel()

    def model(self, deadline: Deadline) -> Model:
        get_model = self._connected(_channel.OPTIONS).unary_unary(*_channel.GET_MODEL)
        metadata = _channel.metadata(self._token)
        backoff = Backoff()
        while True:
            try:
                return Model.from_message(get_model(pb.GetModelRequest(), timeout=deadline.left(), metadata=metadata))
            except grpc.RpcError as error:
                delay = backoff.delay(error)
                if delay is None:
                    raise from_rpc(error) from None
            except ValueError as error:
                raise EncodeFailed(f"the server describes its model wrongly: {error}") from None
            time.sleep(deadline.bound(delay))

    def health(self, service: str, timeout: float | None) -> str:
        check = self._connected(_channel.HEALTH_OPTIONS).unary_unary(*_channel.HEALTH)
        try:
            status = check(service, timeout=timeout, metadata=_channel.metadata(self._token))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return "SERVICE_UNKNOWN"
            raise from_rpc(error) from None
        return _channel.health_name(status)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for channel in self._channels.values():
            channel.close()

    def results(
        self, part: Part, levels: int, deadline: Deadline, metadata: Metadata, calls: "Calls"
    ) -> Iterator[Result]:
        """Results of one part; what was refused before anything was answered is sent again."""
        backoff = Backoff()
        while True:
            assembler = Assembler(part.indices, levels)
            answered = False
            try:
                for response in calls.add(self._start(part, deadline, metadata)):
                    answered = True
                    if (result := assembler.feed(response)) is not None:
                        yield result
                assembler.finish()
                return
            except grpc.RpcError as error:
                delay = backoff.delay(error, answered=answered)
                if delay is None:
                    raise from_rpc(error, part.indices) from None
            calls.wait(deadline.bound(delay))

    def _start(self, part: Part, deadline: Deadline, metadata: Metadata) -> Any:  # noqa: ANN401  # grpc's is private
        if part.one_message:
            encode = self._connected(_channel.OPTIONS).unary_stream(*_channel.ENCODE)
            return encode(part.request(), timeout=deadline.left(), metadata=metadata)
        stream = self._connected(_channel.STREAM_OPTIONS).stream_stream(*_channel.ENCODE_STREAM)
        return stream(part.uploads(), timeout=deadline.left(), metadata=metadata)

    def _connected(self, options: _channel.ChannelOptions) -> grpc.Channel:
        with self._lock:
            if self._closed:
                raise RuntimeError("the client is closed")
            if options not in self._channels:
                self._channels[options] = self._open(options)
            return self._channels[options]

    def _open(self, options: _channel.ChannelOptions) -> grpc.Channel:
        if self._credentials is None:
            return grpc.insecure_channel(self._target, options)
        return grpc.secure_channel(self._target, self._credentials, options)


class Calls:
    """The calls of one request, to be cancelled together, one that is being started included."""

    def __init__(self) -> None:
        self._calls: list[Any] = []
        self._cancelled = threading.Event()

    def add(self, call: Any) -> Any:  # noqa: ANN401  # grpc's type is private
        self._calls.append(call)
        if self._cancelled.is_set():
            call.cancel()
        return call

    def cancel(self) -> None:
        self._cancelled.set()
        for call in self._calls:
            call.cancel()

    def wait(self, seconds: float) -> None:
        """Wait, or until they are cancelled."""
        self._cancelled.wait(seconds)


def _merged(streams: Sequence[Iterator[Result]]) -> Iterator[Result]:
    """Results of all streams as they come; the threads end with their calls, which the caller cancels."""
    arrived: SimpleQueue[Result | Exception | None] = SimpleQueue()

    def drain(stream: Iterator[Result]) -> None:
        try:
            for result in stream:
                arrived.put(result)
            arrived.put(None)
        except Exception as error:  # noqa: BLE001  # whatever it is, the caller waits for it
            arrived.put(error)

    for stream in streams:
        threading.Thread(target=drain, args=(stream,), daemon=True).start()
    running = len(streams)
    while running:
        result = arrived.get()
        if isinstance(result, Exception):
            raise result
        if result is None:
            running -= 1
        else:
            yield result
