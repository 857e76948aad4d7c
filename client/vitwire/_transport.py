"""Channels and RPCs of the client for threads. `_aio_transport.py` holds its twin for asyncio."""

import threading
import time
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import grpc

from vitwire import _channel
from vitwire._channel import Metadata
from vitwire._deadline import Deadline
from vitwire._errors import Unavailable, VitwireError, from_rpc, is_from_server
from vitwire._exchange import Exchange, model_of
from vitwire._model import Model
from vitwire._protocol import Part, Result
from vitwire._retry import Attempts, Policy
from vitwire.v1 import encoder_pb2 as pb

_CLOSE_SECONDS = 5.0
"""gRPC 1.85 cancels all calls and then waits for them, without end for one that Ctrl-C interrupted in its start."""


class Transport:
    """Moves the messages of `_protocol`; nothing of gRPC leaves it."""

    def __init__(
        self, target: str, credentials: grpc.ChannelCredentials | None, token: str | None, policy: Policy
    ) -> None:
        self._target = target
        self._credentials = credentials
        self._token = token
        self._policy = policy
        self._lock = threading.Lock()
        self._closed = False
        self._channels: dict[_channel.ChannelOptions, grpc.Channel] = {}

    def encode(self, parts: Sequence[Part], levels: int, deadline: Deadline) -> Iterator[Result]:
        """Results of all parts as they come; the calls are cancelled when the iterator is closed."""
        metadata = _channel.metadata(self._token)
        calls = Calls()
        exchanges = [Exchange(part, levels, Attempts(self._policy, deadline)) for part in parts]
        streams = [self.results(exchange, metadata, calls) for exchange in exchanges]
        try:
            yield from streams[0] if len(streams) == 1 else _merged(streams)
        finally:
            calls.cancel()

    def model(self, deadline: Deadline) -> Model:
        get_model = self._connected(_channel.OPTIONS).unary_unary(*_channel.GET_MODEL)
        metadata = _channel.metadata(self._token)
        attempts = Attempts(self._policy, deadline)
        while True:
            patience = attempts.patience()
            try:
                timeout = attempts.left() if patience is None else patience
                return model_of(get_model(pb.GetModelRequest(), timeout=timeout, metadata=metadata))
            except grpc.RpcError as error:
                if patience is not None and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    attempts.silent()
                    continue
                delay = attempts.delay(self._explained(error, attempts))
            time.sleep(delay)

    def health(self, service: str, deadline: Deadline) -> str:
        check = self._connected(_channel.HEALTH_OPTIONS).unary_unary(*_channel.HEALTH)
        try:
            status = check(service, timeout=deadline.left(), metadata=_channel.metadata(self._token))
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return "SERVICE_UNKNOWN"
            raise from_rpc(error) from None
        return _channel.health_name(status)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        closing = threading.Thread(target=self._close_channels, daemon=True)
        try:
            closing.start()
        except RuntimeError:  # the interpreter is exiting
            self._close_channels()
        else:
            closing.join(_CLOSE_SECONDS)

    def results(self, exchange: Exchange, metadata: Metadata, calls: "Calls") -> Iterator[Result]:
        """Results of one part; what a server refused or never answered is sent again."""
        while True:
            exchange.begin()
            patience = exchange.attempts.patience()
            call = calls.add(self._start(exchange, metadata))
            try:
                if not _accepted(call, patience):
                    exchange.attempts.silent()
                    continue
                for response in call:
                    if (result := exchange.feed(response)) is not None:
                        yield result
                delay = exchange.finish()
            except grpc.RpcError as error:
                delay = exchange.failed(self._explained(error, exchange.attempts, exchange.part))
            finally:
                calls.drop(call)
            if delay is None:
                yield from exchange.refused()
                return
            calls.wait(delay)

    def _explained(self, error: grpc.RpcError, attempts: Attempts, part: Part | None = None) -> VitwireError:
        """The error; where gRPC only knows that no server is ready, with the reason that a server gives."""
        failure = from_rpc(error, part.indices if part else ())
        if not isinstance(failure, Unavailable) or is_from_server(error):
            return failure
        if attempts.needs_reason():
            attempts.reason = self._reason(attempts.reason)
        return attempts.reason or failure

    def _reason(self, known: VitwireError | None) -> VitwireError | None:
        """Why no server is ready: None if one is; what is known where none answers."""
        ask = self._connected(_channel.HEALTH_OPTIONS).unary_unary(*_channel.GET_MODEL)
        metadata = _channel.metadata(self._token)
        try:
            ask(pb.GetModelRequest(), timeout=_channel.REASON_SECONDS, metadata=metadata)
        except grpc.RpcError as error:
            return from_rpc(error) if error.code() is grpc.StatusCode.UNAVAILABLE else known
        return None

    def _start(self, exchange: Exchange, metadata: Metadata) -> Any:  # noqa: ANN401  # grpc's is private
        part, timeout = exchange.part, exchange.attempts.left()
        if part.one_message:
            encode = self._connected(_channel.OPTIONS).unary_stream(*_channel.ENCODE)
            return encode(part.request(), timeout=timeout, metadata=metadata)
        stream = self._connected(_channel.STREAM_OPTIONS).stream_stream(*_channel.ENCODE_STREAM)
        return stream(part.uploads(), timeout=timeout, metadata=metadata)

    def _connected(self, options: _channel.ChannelOptions) -> grpc.Channel:
        with self._lock:
            if self._closed:
                raise RuntimeError("the client is closed")
            if options not in self._channels:
                self._channels[options] = self._open(options)
            return self._channels[options]

    def _close_channels(self) -> None:
        for channel in list(self._channels.values()):
            channel.close()

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

    def drop(self, call: Any) -> None:  # noqa: ANN401  # as above
        """End one of them; that does nothing to a call that has ended."""
        call.cancel()
        self._calls.remove(call)

    def cancel(self) -> None:
        self._cancelled.set()
        for call in list(self._calls):
            call.cancel()

    def wait(self, seconds: float) -> None:
        """Wait, or until they are cancelled."""
        self._cancelled.wait(seconds)


def _accepted(call: Any, patience: float | None) -> bool:  # noqa: ANN401  # grpc's type is private
    """Whether the server accepted the call, or ended it, within its patience; one that did not is cancelled."""
    if patience is None:
        return True
    silent = threading.Event()

    def give_up() -> None:
        silent.set()
        call.cancel()

    timer = threading.Timer(patience, give_up)
    timer.daemon = True
    timer.start()
    call.initial_metadata()  # there, if empty, once the call has ended
    timer.cancel()
    return not silent.is_set()


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
