"""EncoderService: check, call, map errors, fill."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar

import grpc

from vitwire import wire
from vitwire.v1 import encoder_pb2 as pb
from vitwire_server.core.errors import DeadlineExceeded, EncoderError, NotCached, Overloaded, Unavailable
from vitwire_server.core.health import Health, State
from vitwire_server.core.reports import Accepted
from vitwire_server.observe.metrics.rpc import RpcMetrics
from vitwire_server.observe.tracing import trace_item
from vitwire_server.rpc.acknowledgement import Acknowledgement
from vitwire_server.rpc.boundary import RpcBoundary
from vitwire_server.rpc.calls import Call, Serving
from vitwire_server.rpc.codec import Codec, parsed, priority
from vitwire_server.rpc.deliveries import consumer_of, region_of
from vitwire_server.rpc.grpc_types import Context, Stream, read, wait_for_cancellation
from vitwire_server.rpc.pending_writes import PendingWrites
from vitwire_server.rpc.principals import caller_of, principal
from vitwire_server.rpc.receive_slots import ReceiveSlots
from vitwire_server.rpc.responses import Answer, Outgoing, accepted_message, messages, model_message
from vitwire_server.rpc.status import code_of, worst_of
from vitwire_server.rpc.uploads import Uploads

_log = logging.getLogger(__name__)
T = TypeVar("T")
SERVICE = pb.DESCRIPTOR.services_by_name["EncoderService"].full_name

_REPLICA = "x-vitwire-replica"
_IDLE_FACTOR = 10
"""A stream with nothing in flight may stay open for this many times as long as an upload may stall."""
Chunk: TypeAlias = wire.Frame[pb.EncodeStreamRequest] | wire.Malformed


class EncoderService:
    """Serves the three methods on an event loop; answers UNAVAILABLE until a model is loaded."""

    def __init__(self, metrics: RpcMetrics, health: Health, slots: ReceiveSlots, stall_seconds: float) -> None:
        """A client that sends or reads nothing for `stall_seconds` loses its RPC."""
        self._metrics = metrics
        self._health = health
        self._slots = slots
        self._stall_seconds = stall_seconds
        self._boundary = RpcBoundary(metrics, stall_seconds)
        self._writes = PendingWrites(stall_seconds)
        self._draining = False
        self.serving: Serving | None = None

    async def drain(self, seconds: float) -> None:
        """Refuse new requests; wait at most `seconds` until those in flight are answered."""
        self._draining = True
        await self._boundary.idle(seconds)

    async def encode(self, _: object, context: Context) -> None:
        """`Encode`: every item in one message; each is answered as soon as its batch is done."""
        await self._boundary.run("Encode", context, self._encode(context), counts_as=lambda worst: worst)

    async def encode_stream(self, _: object, context: Context) -> None:
        """`EncodeStream`: items in chunks, many in flight, answered as each is done."""
        await self._boundary.run("EncodeStream", context, self._encode_stream(context), counts_as=lambda worst: worst)

    async def get_model(self, request: object, context: Context) -> pb.GetModelResponse:
        """`GetModel`: the served model and its limits."""
        return await self._boundary.run("GetModel", context, self._get_model(request))

    def counted(self, read: Callable[[bytes], T]) -> Callable[[bytes], T]:
        """A deserialiser that counts the bytes of messages."""

        def read_counted(raw: bytes) -> T:
            self._metrics.received(len(raw))
            return read(raw)

        return read_counted

    async def _encode(self, context: Context) -> grpc.StatusCode:
        """Answers every item; returns the worst code among them."""
        serving = self._ready()
        async with Acknowledgement(context) as acknowledgement:
            with self._call(serving, context) as call:
                await self._submit(serving.codec, call, parsed(await self._slots.read(context)))
                return await self._answer_all(pb.EncodeResponse, call, context, acknowledgement)

    async def _encode_stream(self, context: Context) -> grpc.StatusCode:
        """Answers every item; returns the worst code among them."""
        serving = self._ready()
        async with Acknowledgement(context) as acknowledgement:
            with self._call(serving, context) as call:
                reading = asyncio.create_task(self._read(serving, call, context))
                try:
                    return await self._answer_all(pb.EncodeStreamResponse, call, context, acknowledgement)
                finally:
                    reading.cancel()

    async def _get_model(self, request: object) -> pb.GetModelResponse:
        parsed(request)
        return model_message(self._ready().card)

    def _ready(self) -> Serving:
        if self._draining:
            raise Unavailable("the server is draining")
        if self._health.state is State.FAILED:
            raise Unavailable(f"the server cannot encode: {self._health.reason}")
        if self.serving is None:
            raise Unavailable("the model is still loading")
        return self.serving

    @contextmanager
    def _call(self, serving: Serving, context: Context) -> Iterator[Call]:
        """A call that is always closed; the client learns which replica served it."""
        context.set_trailing_metadata((*(context.trailing_metadata() or ()), (_REPLICA, serving.card.replica)))
        call = Call(serving, principal(context), caller_of(context), context.time_remaining())
        try:
            yield call
        finally:
            for _ in range(call.close()):
                self._metrics.send_cancelled()

    @staticmethod
    async def _submit(codec: Codec, call: Call, request: wire.Request) -> None:
        """Check and submit all items; a frame that outlived this would keep their bytes."""
        call.consumer = consumer_of(request.message, call.principal, "delivery")
        items = codec.items(request, call.consumer)
        for index, item in enumerate(request.message.items):
            call.claim(index, region_of(item))
        call.priority = priority(request.message.priority)
        await call.submit_all(items)
        call.end()

    async def _answer_all(
        self, kind: type[Answer], call: Call, context: Context, acknowledgement: Acknowledgement
    ) -> grpc.StatusCode:
        """Send each item's rows, or its error, as they come, until all are answered; returns the worst code.

        A `content_id` that is not cached is an answer, as the client asked whether it is.
        """
        worst = grpc.StatusCode.OK
        while (answered := await call.next()) is not None:
            index, outcome = answered
            if isinstance(outcome, Accepted):
                await acknowledgement.settle()
                await self._write(context, accepted_message(kind, index, outcome))
                continue
            if isinstance(outcome, EncoderError):
                self._metrics.item_failed(code_of(outcome).name)
            if isinstance(outcome, Overloaded):
                self._metrics.rejected.labels(outcome.reason).inc()
            await acknowledgement.settle()
            start = time.perf_counter()
            for message in messages(kind, index, outcome, call.prepared(index)):
                if message.last:
                    call.free(index)  # once the client has this message, it may use the item's number again
                await self._write(context, message)
            call.sent()
            sending = time.perf_counter() - start
            self._metrics.sent(sending)
            trace_item(index, outcome, sending)
            if isinstance(outcome, EncoderError) and not isinstance(outcome, NotCached):
                worst = worst_of(worst, code_of(outcome))
        return worst

    async def _read(self, serving: Serving, call: Call, context: Context) -> None:
        """Handle the stream's messages; an error ends the call."""
        limits = serving.card.limits
        uploads = Uploads(serving.codec, call, serving.card.dtype, limits.items_per_request, self._stall_seconds)
        try:
            while (message := await self._message(uploads, call, context)) is not None:
                frame = parsed(message)
                await uploads.take(frame.message, frame.data)
                # Twice as many as may wait for other items, which may be those whose bytes are to be read.
                await call.room(2 * limits.items_per_request)
            if uploads.waiting:
                await wait_for_cancellation()
            uploads.finish()
            call.end()
        except Exception as error:  # noqa: BLE001 - the RPC, which waits for outcomes, raises and maps it
            call.end(error)

    async def _message(self, uploads: Uploads, call: Call, context: Stream[Chunk, Any]) -> Chunk | None:
        """The next message. Raises DeadlineExceeded where an upload stalls, or a stream stays idle for too long."""
        seconds = (
            uploads.time_left() if uploads.waiting else self._stall_seconds * _IDLE_FACTOR if call.is_idle else None
        )
        start = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                return await read(context)
        except TimeoutError:
            if uploads.waiting:
                raise uploads.stalled() from None
            raise DeadlineExceeded(f"no message arrived for {seconds:.3g} s while nothing was in flight") from None
        finally:
            uploads.waited += time.monotonic() - start

    async def _write(self, context: Context, message: Outgoing) -> None:
        """Send a message. Raises CancelledError if the client is gone, DeadlineExceeded if it does not read."""
        try:
            await self._writes.complete(context.write(message.raw))
            self._metrics.delivered(message.rows_bytes)
        except TimeoutError:
            raise DeadlineExceeded(f"the client did not read the response for {self._stall_seconds:g} s") from None
        except Exception as error:  # noqa: BLE001 - gRPC raises errors of its private core when a stream is gone
            _log.debug("a client left while its response was written: %r", error)
            raise asyncio.CancelledError from None


def handlers(service: EncoderService) -> grpc.GenericRpcHandler:
    """The service's methods; tensors are not copied on the way in, and responses are bytes already."""
    read_request = service.counted(wire.read_request)
    read_stream = service.counted(partial(wire.read_chunk, pb.EncodeStreamRequest))
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        # On the wire a unary request is a stream of one message; handled as a stream, it is read when a slot is free.
        "Encode": grpc.stream_stream_rpc_method_handler(service.encode, read_request),
        "EncodeStream": grpc.stream_stream_rpc_method_handler(service.encode_stream, read_stream),
        "GetModel": grpc.unary_unary_rpc_method_handler(
            service.get_model, partial(wire.read_plain, pb.GetModelRequest), pb.GetModelResponse.SerializeToString
        ),
    }
    declared = {method.name for method in pb.DESCRIPTOR.services_by_name["EncoderService"].methods}
    assert declared == methods.keys(), "every declared method has a handler"
    return grpc.method_handlers_generic_handler(SERVICE, methods)
