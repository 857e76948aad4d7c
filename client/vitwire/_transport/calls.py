"""Channels and RPCs of the synchronous client. `aio_calls.py` is the same for asyncio."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import grpc

from vitwire._delivery.answers import Answer
from vitwire._delivery.nixl import ROOM_SECONDS
from vitwire._transport import channel as grpc_channel
from vitwire._transport import unary_streams
from vitwire._transport.arrivals import merged
from vitwire._transport.attempts import Attempts, Deadline
from vitwire._transport.balancing import Replicas
from vitwire._transport.channel import StreamCall
from vitwire._transport.connections import Connection, Connections
from vitwire._transport.context import Context, Metadata
from vitwire._transport.diagnosis import diagnosed, unheard
from vitwire._transport.exchange import Exchange, model_of
from vitwire._transport.protocol import Part
from vitwire._transport.slots import Slots
from vitwire.errors import EncodeFailed, Unavailable, VitwireError, from_rpc, is_from_server
from vitwire.model import Model
from vitwire.v1 import encoder_pb2 as pb

_CLOSE_SECONDS = 5.0
"""gRPC 1.85 cancels all calls and then waits for them, without end for one that Ctrl-C interrupted in its start."""


class Transport:
    """Sends the messages of `protocol`. No types or errors of gRPC leave this class."""

    def __init__(self, channels: grpc_channel.Channels, connections: int, max_in_flight: int | None = None) -> None:
        self.slots = Slots(max_in_flight)
        """Limits requests in flight; the caller of `encode` holds one."""
        self._security, self._target = channels.security, channels.target
        self._timers = Timers()
        self.connections: Connections[grpc.Channel] = Connections(channels.open, connections)
        self.replicas = Replicas()

    def encode(
        self,
        parts: Sequence[Part],
        deadline: Deadline,
        context: Context,
        calls: "Calls | None" = None,
    ) -> Iterator[Answer]:
        """Results of all parts as they arrive; the calls are cancelled when the iterator is closed."""
        calls = calls or Calls()
        exchanges = [Exchange(part, Attempts(context.policy, deadline), context.request_id) for part in parts]
        common = {stream: self.connections.common(parts, stream=stream) for stream in (True, False)}
        streams = [self.results(each, context.metadata, calls, common[not each.part.one_message]) for each in exchanges]
        try:
            yield from streams[0] if len(streams) == 1 else merged(streams)
        finally:
            calls.cancel()

    def model(self, deadline: Deadline, context: Context, calls: "Calls | None" = None) -> Model:
        calls = calls or Calls()
        get_model = self.connections.control(grpc_channel.OPTIONS).unary_unary(*grpc_channel.GET_MODEL)
        attempts = Attempts(context.policy, deadline)
        while True:
            accept_timeout = attempts.accept_timeout()
            try:
                timeout = attempts.left() if accept_timeout is None else accept_timeout
                return model_of(get_model(pb.GetModelRequest(), timeout=timeout, metadata=context.metadata))
            except grpc.RpcError as error:
                if accept_timeout is not None and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    attempts.unanswered()
                    continue
                delay = attempts.delay(self.with_reason(error, attempts, context.metadata))
            calls.wait(delay)
            calls.check()

    def health(self, service: str, deadline: Deadline, context: Context) -> str:
        check = self.connections.control(grpc_channel.HEALTH_OPTIONS).unary_unary(*grpc_channel.HEALTH)
        try:
            status = check(service, timeout=deadline.left(), metadata=context.metadata)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return "SERVICE_UNKNOWN"
            raise unheard(diagnosed(from_rpc(error), self._security), self._target) from None
        return grpc_channel.health_name(status)

    def close(self) -> None:
        channels = self.connections.close()
        if self.connections.is_forked:
            return
        self._timers.close()
        closing = threading.Thread(target=_close_all, args=(channels,), daemon=True)
        try:
            closing.start()
        except RuntimeError:  # the interpreter is exiting
            _close_all(channels)
        else:
            closing.join(_CLOSE_SECONDS)

    def results(
        self, exchange: Exchange, metadata: Metadata, calls: "Calls", again: Connection[grpc.Channel] | None = None
    ) -> Iterator[Answer]:
        """Results of one part; what a server refused or never answered is sent again.

        again: the connection of the first attempt.
        """
        while True:
            with closing(exchange):
                while not exchange.begin():
                    exchange.check_deadline()
                    if not calls.wait(ROOM_SECONDS):
                        return
                accept_timeout, part = exchange.attempts.accept_timeout(), exchange.part
                read = (grpc_channel.ENCODE if part.one_message else grpc_channel.ENCODE_STREAM).deserializer
                with (
                    self.connections.bulk(
                        part.transfer_bytes, stream=not part.one_message, routed=exchange.is_routed, again=again
                    ) as connection,
                    calls.reading(self._start(connection.channel, exchange, metadata)) as call,
                    closing(Acceptance(call, self._timers, accept_timeout)) as acceptance,
                ):
                    try:
                        for raw in call:
                            if (result := exchange.feed(read(raw))) is not None:
                                yield result
                        self.replicas.saw(call.trailing_metadata())
                        delay = exchange.finish()
                    except grpc.RpcError as error:
                        if exchange.is_complete:
                            return
                        if acceptance.is_missing:
                            again = exchange.unanswered(connection)
                            continue
                        calls.check()
                        delay = exchange.failed(self.with_reason(error, exchange.attempts, metadata, part), connection)
            again = None
            if delay is None:
                yield from exchange.refused()
                return
            calls.wait(delay)

    def with_reason(
        self, error: grpc.RpcError, attempts: Attempts, metadata: Metadata, part: Part | None = None
    ) -> VitwireError:
        """The error; if gRPC only reports that no server is ready, what that means, or the reason of a server."""
        if self.connections.is_closed:
            return EncodeFailed("the client was closed during the call", code="CANCELLED")
        failure = from_rpc(error, part.indices if part else ())
        if not isinstance(failure, Unavailable) or is_from_server(error):
            return failure
        if (meaning := diagnosed(failure, self._security)) is not failure:
            return meaning
        if attempts.needs_reason():
            attempts.reason = self._reason(attempts.reason, metadata)
        return unheard(attempts.reason or failure, self._target)

    def _reason(self, known: VitwireError | None, metadata: Metadata) -> VitwireError | None:
        """Why no server is ready: None if one is ready, `known` if none answers."""
        get_model = self.connections.control(grpc_channel.HEALTH_OPTIONS).unary_unary(*grpc_channel.GET_MODEL)
        try:
            get_model(pb.GetModelRequest(), timeout=grpc_channel.REASON_SECONDS, metadata=metadata)
        except grpc.RpcError as error:
            return from_rpc(error) if error.code() is grpc.StatusCode.UNAVAILABLE else known
        return None

    def _start(self, channel: grpc.Channel, exchange: Exchange, metadata: Metadata) -> StreamCall:
        """A call whose responses are bytes; so is a single request. gRPC hides errors raised in serialisers."""
        part, metadata = exchange.part, exchange.metadata(metadata)
        if part.one_message:
            request = grpc_channel.ENCODE.serializer(part.request())
            encode: Callable[..., StreamCall] = channel.unary_stream(grpc_channel.ENCODE.path)
            return encode(request, timeout=exchange.attempts.left(), metadata=metadata)
        path, write, _ = grpc_channel.ENCODE_STREAM
        stream: Callable[..., StreamCall] = channel.stream_stream(path, write)
        return stream(part.uploads(), timeout=exchange.attempts.left(), metadata=metadata)


class Timers:
    """Calls functions after a time, from one thread, which runs while timers are set. Thread-safe.

    Most timers are cancelled long before they are due, so setting one wakes the thread only if it is the earliest.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._set: dict[object, tuple[float, Callable[[], object]]] = {}
        self._is_running = False
        self._wakes_at = 0.0

    def start(self, seconds: float, function: Callable[[], object]) -> object:
        """Call the function after `seconds`; returns the timer."""
        timer, due = object(), time.monotonic() + seconds
        with self._changed:
            self._set[timer] = due, function
            if not self._is_running:
                self._is_running = True
                self._wakes_at = due
                threading.Thread(target=self._run, name="vitwire-timers", daemon=True).start()
            elif due < self._wakes_at:
                self._changed.notify()
        return timer

    def cancel(self, timer: object) -> bool:
        """Cancel the timer; False if it was due before."""
        with self._changed:
            return self._set.pop(timer, None) is not None

    def close(self) -> None:
        """Cancel all timers and end the thread."""
        with self._changed:
            self._set.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._set:
                    self._is_running = False
                    return
                self._wakes_at = min(due for due, _ in self._set.values())
                if (left := self._wakes_at - time.monotonic()) > 0:
                    self._changed.wait(left)
                now = time.monotonic()
                expired = [timer for timer, (due, _) in self._set.items() if due <= now]
                functions = [self._set.pop(timer)[1] for timer in expired]
            for function in functions:
                function()


class Acceptance:
    """Cancels a call that the server has neither accepted nor ended when a time has passed."""

    def __init__(self, call: StreamCall, timers: Timers, timeout: float | None) -> None:
        self.is_missing = False
        self._call = call
        self._timers = timers
        self._timer = None if timeout is None else timers.start(timeout, self._check)

    def close(self) -> None:
        if self._timer:
            self._timers.cancel(self._timer)

    def _check(self) -> None:
        if not unary_streams.has_headers(self._call):
            self.is_missing = True  # before the thread that reads the call sees its end
            if not self._call.cancel():  # it has just ended
                self.is_missing = False


class Calls:
    """The calls of one request, which are cancelled together, including one that is being started."""

    def __init__(self) -> None:
        self._calls: list[StreamCall] = []
        self._cancelled = threading.Event()

    @contextmanager
    def reading(self, call: StreamCall) -> Iterator[StreamCall]:
        """A call that this thread reads until the end of the block, which cancels it if it has not ended."""
        self._calls.append(call)
        if self._cancelled.is_set():
            call.cancel()
        is_interrupted = True
        try:
            yield call
            is_interrupted = False
        except unary_streams.ENDS:
            is_interrupted = False
            raise
        finally:
            call.cancel()
            if not is_interrupted:
                unary_streams.drain(call)
            self._calls.remove(call)

    def cancel(self) -> None:
        self._cancelled.set()
        for call in list(self._calls):
            call.cancel()

    def check(self) -> None:
        """Raises EncodeFailed if the calls were cancelled."""
        if self._cancelled.is_set():
            raise EncodeFailed("the call was cancelled", code="CANCELLED")

    def wait(self, seconds: float) -> bool:
        """Wait, at most until the calls are cancelled; returns whether they are not."""
        return not self._cancelled.wait(seconds)


def _close_all(channels: Sequence[grpc.Channel]) -> None:
    for channel in channels:
        channel.close()
