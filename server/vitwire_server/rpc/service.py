"""EncoderService: check, call, map errors, fill."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from vitwire import wire
from vitwire.v1 import encoder_pb2 as pb
from vitwire_server.core.errors import DeadlineExceeded, EncoderError, NotCached, Overloaded, Unavailable
from vitwire_server.core.items import Item
from vitwire_server.core.models import ModelCard
from vitwire_server.observe.metrics import Metrics
from vitwire_server.rpc.answers import Answer, frames, model_message
from vitwire_server.rpc.calls import Call
from vitwire_server.rpc.codec import Codec, raise_if_malformed
from vitwire_server.rpc.status import code_of, message_of, trailers_of
from vitwire_server.rpc.uploads import Uploads
from vitwire_server.scheduling.admission import Admission
from vitwire_server.scheduling.scheduler import Scheduler
from vitwire_server.scheduling.traces import TraceWriter

_log = logging.getLogger(__name__)
SERVICE = pb.DESCRIPTOR.services_by_name["EncoderService"].full_name

Context = grpc.aio.ServicerContext[Any, Any]
_WHOLE = -1
"""Under which an Encode call holds the one permit for all its items, until it is closed."""
_IDLE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Serving:
    """What the service works with, once the model is there."""

    card: ModelCard
    codec: Codec
    scheduler: Scheduler


class EncoderService:
    """Serves the three methods on an event loop; UNAVAILABLE until it has a model to serve with."""

    def __init__(self, metrics: Metrics, admission: Admission, trace: TraceWriter | None = None) -> None:
        self._metrics = metrics
        self._admission = admission
        self._trace = trace
        self.serving: Serving | None = None
        self._active = 0
        self._draining = False
        self._idle = asyncio.Event()

    async def drain(self, seconds: float) -> None:
        """Turn new requests away and wait until those in flight are answered, at most so long."""
        self._draining = True
        self._note_idle()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)

    def _note_idle(self) -> None:
        if self._draining and not self._active:
            self._idle.set()

    async def encode(self, request: wire.Request | wire.Malformed, context: Context) -> None:
        """`Encode`: every item in one message; each is answered as soon as its batch is done."""
        async with self._rpc("Encode", context):
            serving = self._ready()
            raise_if_malformed(request)
            assert isinstance(request, wire.Request)
            items = serving.codec.items(request)
            call = self._call(serving, context)
            try:
                call.set_priority(serving.codec.priority(request.message.priority))
                self._submit(serving.codec, call, items)
                await self._answer_all(pb.EncodeResponse, call, context)
            finally:
                call.close()

    async def encode_stream(self, _: object, context: Context) -> None:
        """`EncodeStream`: items in chunks, many in flight, answered as each is done."""
        async with self._rpc("EncodeStream", context):
            serving = self._ready()
            call = self._call(serving, context)
            reading = asyncio.create_task(self._read(serving, call, context))
            try:
                await self._answer_all(pb.EncodeStreamResponse, call, context)
            finally:
                reading.cancel()
                call.close()

    async def get_model(self, request: object, context: Context) -> pb.GetModelResponse:
        """`GetModel`: what is served, and within which limits."""
        async with self._rpc("GetModel", context):
            raise_if_malformed(request)
            return model_message(self._ready().card)
        raise AssertionError("what the RPC raises is never swallowed")

    def _ready(self) -> Serving:
        if self.serving is None:
            raise Unavailable("the model is still loading")
        if self._draining:
            raise Unavailable("the server is draining")
        return self.serving

    def _call(self, serving: Serving, context: Context) -> Call:
        return Call(serving.scheduler, self._admission, context.time_remaining(), self._trace)

    @staticmethod
    def _submit(codec: Codec, call: Call, items: list[Item | NotCached]) -> None:
        """Admit all items or none, then queue them."""
        call.open(range(len(items)))
        work = [(index, item) for index, item in enumerate(items) if isinstance(item, Item)]
        if work:
            call.admit(_WHOLE, len(work), sum(codec.weight(item, item.output) for _, item in work))
        for index, item in enumerate(items):
            if isinstance(item, NotCached):
                call.settle(index, item)
        call.submit(work)
        call.finish()

    async def _answer_all(self, kind: type[Answer], call: Call, context: Context) -> None:
        """Send each item's rows, or its error, as they come; until all items are answered."""
        while (answered := await call.next()) is not None:
            index, outcome = answered
            if isinstance(outcome, Overloaded):
                self._metrics.rejected.labels(outcome.reason).inc()
            start = time.perf_counter()
            for frame in frames(kind, index, outcome):
                if frame.message.HasField("error") or frame.message.chunk.last:
                    call.release(index)  # once the client has this frame, the item's number is free
                await _write(context, frame)
            self._metrics.sent(time.perf_counter() - start)

    async def _read(self, serving: Serving, call: Call, context: Context) -> None:
        """Take the stream's messages; ends the call with whatever goes wrong on the way."""
        limits = serving.card.limits
        uploads = Uploads(serving.codec, call, serving.card.dtype, limits.items_per_request)
        try:
            while (message := await self._message(uploads, context)) is not grpc.aio.EOF:
                raise_if_malformed(message)
                await uploads.take(message.message, message.data)
                await call.room(limits.items_per_request)
            uploads.finish()
            call.finish()
        except Exception as error:  # noqa: BLE001 - the RPC, which waits for outcomes, maps it
            call.fail(error)

    @staticmethod
    async def _message(uploads: Uploads, context: Context) -> Any:  # noqa: ANN401 - grpc's reader has no type
        """The next message; an upload that stands still must not hold its permit for ever."""
        try:
            return await asyncio.wait_for(context.read(), _IDLE_SECONDS if uploads.waiting else None)
        except TimeoutError:
            raise DeadlineExceeded(f"no bytes arrived for {_IDLE_SECONDS:g} s while an upload was open") from None

    @asynccontextmanager
    async def _rpc(self, method: str, context: Context) -> AsyncIterator[None]:
        """Counts an RPC and maps what it raises; the one place that catches everything."""
        start = time.perf_counter()
        code = grpc.StatusCode.OK
        self._metrics.inflight.inc()
        self._active += 1
        try:
            yield
        except EncoderError as error:
            code = code_of(error)
            if isinstance(error, Overloaded):
                self._metrics.rejected.labels(error.reason).inc()
            await context.abort(code, message_of(error), trailers_of(error))
        except asyncio.CancelledError:
            code = _cancellation(context)
            raise
        except Exception:  # noqa: BLE001 - the edge: a bug ends its RPC, not the server
            if context.cancelled():  # the client left while rows were being written
                code = grpc.StatusCode.CANCELLED
                raise asyncio.CancelledError from None
            code = grpc.StatusCode.INTERNAL
            _log.exception("%s failed, request %s", method, _request_id(context))
            await context.abort(code, "internal error, see the server's log")
        finally:
            self._active -= 1
            self._note_idle()
            self._metrics.inflight.dec()
            self._metrics.requests.labels(method, code.name).inc()
            self._metrics.request_seconds.labels(method).observe(time.perf_counter() - start)


async def _write(context: Context, frame: wire.Frame[Answer]) -> None:
    """Send a message. Raises CancelledError where the client is gone."""
    try:
        await context.write(frame)
    except Exception as error:  # noqa: BLE001 - gRPC raises errors of its private core when a stream is gone
        _log.debug("a client left while it was answered: %r", error)
        raise asyncio.CancelledError from None


def _request_id(context: Context) -> str:
    """What the client calls its request, for the log."""
    return str(dict(context.invocation_metadata() or ()).get("x-request-id", "without id"))


def _cancellation(context: Context) -> grpc.StatusCode:
    remaining = context.time_remaining()
    expired = remaining is not None and remaining <= 0
    return grpc.StatusCode.DEADLINE_EXCEEDED if expired else grpc.StatusCode.CANCELLED


def handlers(service: EncoderService) -> grpc.GenericRpcHandler:
    """The service's methods with serialisers that do not copy tensors."""
    read_stream = partial(wire.read_chunk, pb.EncodeStreamRequest)
    methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Encode": grpc.unary_stream_rpc_method_handler(service.encode, wire.read_request, wire.write_chunk),
        "EncodeStream": grpc.stream_stream_rpc_method_handler(service.encode_stream, read_stream, wire.write_chunk),
        "GetModel": grpc.unary_unary_rpc_method_handler(
            service.get_model, partial(wire.read_plain, pb.GetModelRequest), pb.GetModelResponse.SerializeToString
        ),
    }
    declared = {method.name for method in pb.DESCRIPTOR.services_by_name["EncoderService"].methods}
    assert declared == methods.keys(), "every declared method has a handler"
    return grpc.method_handlers_generic_handler(SERVICE, methods)
