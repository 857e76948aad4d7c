"""EncoderService: check, call, map errors, fill."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import grpc

from vitwire import wire
from vitwire.v1 import encoder_pb2 as pb
from vitwire_server.core.errors import EncoderError, NotCached, Overloaded, Unavailable
from vitwire_server.core.health import Health, State
from vitwire_server.core.reports import Accepted
from vitwire_server.observe.metrics.rpc import RpcMetrics
from vitwire_server.observe.tracing import trace_item
from vitwire_server.rpc.boundary import RpcBoundary
from vitwire_server.rpc.calls import Call, Serving
from vitwire_server.rpc.checks import consumer_of, region_of
from vitwire_server.rpc.codec import parsed, priority
from vitwire_server.rpc.credentials import caller_of, principal
from vitwire_server.rpc.decodes import submit_all
from vitwire_server.rpc.grpc_types import Context
from vitwire_server.rpc.receive_slots import ReceiveSlots
from vitwire_server.rpc.response_messages import Answer, accepted_message, messages, model_message
from vitwire_server.rpc.response_writer import PendingWrites, ResponseWriter
from vitwire_server.rpc.status import code_of, worst_of
from vitwire_server.rpc.uploads import Uploads

T = TypeVar("T")
SERVICE = pb.DESCRIPTOR.services_by_name["EncoderService"].full_name

_REPLICA = "x-vitwire-replica"


class EncoderService:
    """Serves the three methods on an event loop; answers UNAVAILABLE until a model is loaded."""

    def __init__(self, metrics: RpcMetrics, health: Health, slots: ReceiveSlots, stall_seconds: float) -> None:
        """A client that sends or reads nothing for `stall_seconds` loses its RPC."""
        self._metrics = metrics
        self._health = health
        self._slots = slots
        self._stall_seconds = stall_seconds
        self.boundary = RpcBoundary(SERVICE, metrics, stall_seconds)
        self._writes = PendingWrites(stall_seconds)
        self._draining = False
        self.serving: Serving | None = None

    async def drain(self, seconds: float) -> None:
        """Refuse new requests; wait at most `seconds` until those in flight are answered."""
        self._draining = True
        await self.boundary.idle(seconds)

    def handlers(self) -> grpc.GenericRpcHandler:
        """The service's methods; tensors are not copied on the way in, and responses are bytes already."""
        read_request = self._counted(wire.read_request)
        read_stream = self._counted(partial(wire.read_chunk, pb.EncodeStreamRequest))
        read_model = partial(wire.read_plain, pb.GetModelRequest)
        write_model = pb.GetModelResponse.SerializeToString
        # On the wire a unary request is a stream of one message; handled as a stream, it is read when a slot is free.
        streams = grpc.stream_stream_rpc_method_handler
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Encode": streams(self._encode, read_request),
            "EncodeStream": streams(self._encode_stream, read_stream),
            "GetModel": grpc.unary_unary_rpc_method_handler(self._get_model, read_model, write_model),
        }
        declared = {method.name for method in pb.DESCRIPTOR.services_by_name["EncoderService"].methods}
        assert declared == methods.keys(), "every declared method has a handler"
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _counted(self, read: Callable[[bytes], T]) -> Callable[[bytes], T]:

        def read_counted(raw: bytes) -> T:
            self._metrics.received(len(raw))
            return read(raw)

        return read_counted

    async def _encode(self, _: object, context: Context) -> grpc.StatusCode:
        """Every item in one message; each is answered as soon as its batch is done. Returns the worst code of them."""
        async with ResponseWriter(context, self._writes, self._metrics) as writer:
            with self._call(context) as call:
                await self._submit(call, parsed(await self._slots.read(context)))
                return await self._answer_all(pb.EncodeResponse, call, writer)

    async def _encode_stream(self, _: object, context: Context) -> grpc.StatusCode:
        """Items in chunks, many in flight, answered as each is done. Returns the worst code among them."""
        async with ResponseWriter(context, self._writes, self._metrics) as writer:
            with self._call(context) as call:
                call.run(Uploads(call, self._stall_seconds).read_all(context))
                return await self._answer_all(pb.EncodeStreamResponse, call, writer)

    async def _get_model(self, request: object, _: Context) -> pb.GetModelResponse:
        """The served model and its limits."""
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
    def _call(self, context: Context) -> Iterator[Call]:
        """A call that is always closed; the client learns which replica served it."""
        serving = self._ready()
        context.set_trailing_metadata((*(context.trailing_metadata() or ()), (_REPLICA, serving.card.replica)))
        call = Call(serving, principal(context), caller_of(context), context.time_remaining())
        try:
            yield call
        finally:
            for _ in range(call.close()):
                self._metrics.send_cancelled()

    @staticmethod
    async def _submit(call: Call, request: wire.Request) -> None:
        """Check and submit all items; a frame that outlived this would keep their bytes."""
        call.consumer = consumer_of(request.message, call.principal, "delivery")
        items = call.serving.codec.items(request, call.consumer)
        for index, item in enumerate(request.message.items):
            call.claim(index, region_of(item))
        call.priority = priority(request.message.priority)
        await submit_all(call, items)
        call.answers.end()

    async def _answer_all(self, kind: type[Answer], call: Call, writer: ResponseWriter) -> grpc.StatusCode:
        """Send each item's rows, or its error, as they come, until all are answered; returns the worst code.

        A `content_id` that is not cached is an answer, as the client asked whether it is.
        """
        worst = grpc.StatusCode.OK
        while (answered := await call.answers.next()) is not None:
            index, outcome = answered
            if isinstance(outcome, Accepted):
                await writer.write(accepted_message(kind, index, outcome, call.answers.items[index].prepared))
                continue
            if isinstance(outcome, EncoderError):
                self._metrics.item_failed(code_of(outcome).name)
                worst = worst if isinstance(outcome, NotCached) else worst_of(worst, code_of(outcome))
            if isinstance(outcome, Overloaded):
                self._metrics.rejected.labels(outcome.reason).inc()
            start = time.perf_counter()
            for message in messages(kind, index, outcome, call.answers.items[index].prepared):
                if message.last:
                    call.free(index)  # once the client has this message, it may use the item's number again
                await writer.write(message)
            call.sent()
            sending = time.perf_counter() - start
            self._metrics.sent(sending)
            trace_item(index, outcome, sending)
        return worst
