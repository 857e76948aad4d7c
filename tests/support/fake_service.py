"""A fake encoder service in plain protobuf, for tests of the client."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from entered import entered
from fake_preparing import describe, prepared
from vitwire import Item
from vitwire.v1 import encoder_pb2 as pb
from vitwire.v1 import encoder_pb2_grpc

SERVICE = "vitwire.v1.EncoderService"
WIDTH, LEVELS, MERGE = 12, 2, 2
WIRE = {
    pb.DATA_TYPE_FLOAT32: np.float32,
    pb.DATA_TYPE_FLOAT16: np.float16,
    pb.DATA_TYPE_BFLOAT16: np.uint16,
    pb.DATA_TYPE_UINT8: np.uint8,
}


def item(tokens: int = 4, value: float = 1.0, **kwargs: Any) -> Item:
    """An item of `tokens` tokens whose first pixel is `value`."""
    pixels = np.full((4 * tokens, 6), value, np.float32)
    return Item(pixels, (1, 2 * tokens, 2), **kwargs)


def expected(tokens: int, value: float) -> np.ndarray:
    """What the fake service answers for `item(tokens, value)`."""
    return (value + np.arange(tokens)[:, None] + np.arange(WIDTH) * 0.5).astype(np.float32)


def model_message() -> pb.GetModelResponse:
    message = pb.GetModelResponse(
        model_id="tiny",
        model_type="qwen3_vl",
        weights_fingerprint="ab",
        data_type=pb.DATA_TYPE_BFLOAT16,
        embedding_width=WIDTH,
        deepstack_levels=LEVELS,
        patch_size=4,
        merge_size=MERGE,
        temporal_patch_size=2,
        channels=3,
        budgets=[pb.Budget(tokens=64, items=4, segments=4, segment_patches=256)],
        limits=pb.Limits(items_per_request=16),
        graphs="off",
        attention_backend="sdpa",
        device="cpu",
        server_version="0",
        preparation=pb.Preparation(place="device"),
        clip_decoding=pb.Preparation(place="cpu", reason="asked"),
        unavailable=[pb.Unavailable(feature="fa4", reason="not installed")],
        dropped_budgets=[pb.DroppedBudget(tokens=128, reason="no memory")],
    )
    describe(message)
    return message


def _failed(code: int, message: str, field: str, description: str) -> Status:
    status = Status(code=code, message=message)
    status.details.add().Pack(BadRequest(field_violations=[{"field": field, "description": description}]))
    return status


def _encode(number: int, sent: pb.Item, output: Any, kind: type) -> Iterator[Any]:
    output = output or pb.DATA_TYPE_BFLOAT16
    if sent.content_id.startswith("error:"):
        code = grpc.StatusCode[sent.content_id.removeprefix("error:")].value[0]
        yield kind(item=number, error=_failed(code, "as asked", f"items[{number}].pixels", "bad"))
        return
    try:
        made = prepared(sent)
    except OSError as error:
        yield kind(item=number, error=_failed(3, str(error), f"items[{number}].encoded", "cannot be decoded"))
        return
    if made is None:
        pixels = np.frombuffer(sent.pixels.data, WIRE[sent.pixels.data_type])
        assert pixels.size == np.prod(sent.pixels.shape), "the bytes match the shape"
        if sent.pixels.data_type == pb.DATA_TYPE_BFLOAT16:
            pixels = (pixels.astype(np.uint32) << 16).view(np.float32)
    grid, value = made or (sent.grid, float(pixels[0]))
    tokens = grid.t * grid.h * grid.w // MERGE**2
    rows = expected(tokens, value)
    if output == pb.DATA_TYPE_BFLOAT16:
        rows = (rows.view(np.uint32) >> 16).astype(np.uint16)
    rows = rows.astype(WIRE[output])
    report = pb.ItemReport(
        path=pb.PATH_GRAPH,
        budget_tokens=64,
        tokens=tokens,
        grid=made and grid,
        queued=Duration(nanos=1000),
        encoded=Duration(seconds=1),
    )
    half = tokens // 2
    for row, part in ((0, rows[:half]), (half, rows[half:])):
        last = row + len(part) == tokens
        chunk = pb.EmbeddingChunk(data_type=output, shape=rows.shape, row=row, last=last, data=part.tobytes())
        yield kind(item=number, chunk=chunk, report=report if last else None)


@dataclass
class Fake(encoder_pb2_grpc.EncoderServiceServicer):
    """Encodes as a real service would; `before` may abort an RPC, `bend` may change its responses."""

    before: Callable[[grpc.ServicerContext], None] = lambda context: None
    bend: Callable[[Iterator[Any]], Iterator[Any]] = lambda responses: responses
    methods: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    """Of the last RPC."""
    options: list[tuple[int, int]] = field(default_factory=list)
    """Output type and priority of each request."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    fingerprint: str = "ab"
    """Of the weights."""
    prepares: bool = True
    """Whether it prepares pictures and files."""
    change: Callable[[pb.GetModelResponse], object] = lambda message: None
    """May change what it says of the model."""
    takes: tuple[str, ...] = ()
    """Options of images. An older server has none."""
    sent: list[pb.Item] = field(default_factory=list)
    """Items of `Encode`."""

    def _enter(self, method: str, context: grpc.ServicerContext) -> None:
        self.methods.append(method)
        self.metadata = {key: str(value) for key, value in context.invocation_metadata()}
        self.before(context)

    def _answer(self, responses: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """The responses after `bend`; sets `cancelled` if the RPC ends before they do."""
        finished = threading.Event()
        context.add_callback(lambda: None if finished.is_set() else self.cancelled.set())
        try:
            yield from self.bend(responses)
        except ConnectionAbortedError:
            context.abort(grpc.StatusCode.UNAVAILABLE, "as asked")
        finished.set()

    def Encode(self, request: pb.EncodeRequest, context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        self._enter("Encode", context)
        self.options.append((request.output_type, request.priority))
        self.sent += request.items

        def responses() -> Iterator[Any]:
            for number in reversed(range(len(request.items))):
                yield from _encode(number, request.items[number], request.output_type, pb.EncodeResponse)

        yield from self._answer(responses(), context)

    def EncodeStream(self, request_iterator: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:  # noqa: N802
        self._enter("EncodeStream", context)

        def responses() -> Iterator[Any]:
            output: Any = 0
            headers, received, files = {}, {}, set[int]()
            for request in request_iterator:
                kind = request.WhichOneof("message")
                if kind == "options":
                    output = request.options.output_type
                    self.options.append((output, request.options.priority))
                elif kind == "header":
                    headers[request.header.item] = request.header.header
                    received[request.header.item] = b""
                    files |= {request.header.item} if request.header.encoded_bytes else set()
                else:
                    assert len(request.chunk.data) <= 1 << 20
                    received[request.chunk.item] += request.chunk.data
            for number, header in headers.items():
                if number in files:
                    header.encoded = received[number]
                else:
                    header.pixels.data = received[number]
                yield from _encode(number, header, output, pb.EncodeStreamResponse)

        yield from self._answer(responses(), context)

    def GetModel(self, request: pb.GetModelRequest, context: grpc.ServicerContext) -> pb.GetModelResponse:  # noqa: N802
        self._enter("GetModel", context)
        message = model_message()
        message.weights_fingerprint = self.fingerprint
        message.options.extend(self.takes)
        if not self.prepares:
            message.ClearField("prepared")
        self.change(message)
        return message


def abort(context: grpc.ServicerContext, code: grpc.StatusCode, *details: Any, **trailing: str) -> None:
    """End the RPC with a status and its details."""
    status = Status(code=code.value[0], message="as asked")
    for detail in details:
        status.details.add().Pack(detail)
    raw: list[Any] = [("grpc-status-details-bin", status.SerializeToString())]
    context.set_trailing_metadata((*raw, *((key.replace("_", "-"), value) for key, value in trailing.items())))
    context.abort(code, "as asked")


def bad_request(name: str) -> BadRequest:
    return BadRequest(field_violations=[{"field": name, "description": "bad"}])


def retry_info(seconds: int, nanos: int) -> RetryInfo:
    return RetryInfo(retry_delay=Duration(seconds=seconds, nanos=nanos))


@dataclass
class Running:
    fake: Fake
    target: str
    health: health.HealthServicer
    server: grpc.Server


@contextmanager
def serving(fake: Fake, port: int = 0, *, host: str = "127.0.0.1", shared: bool = False) -> Iterator[Running]:
    """The service on a loopback port, healthy; a free port by default. shared: other servers may listen on it too."""
    pool = ThreadPoolExecutor(64)  # each watch of the health takes a thread
    server = grpc.server(
        pool, options=[("grpc.so_reuseport", int(shared)), ("grpc.http2.min_ping_interval_without_data_ms", 10_000)]
    )
    # Its variant without a thread deadlocks where a client leaves at the moment of its watch's first response.
    checks = health.HealthServicer(experimental_non_blocking=False)
    for name in ("", SERVICE):
        checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    encoder_pb2_grpc.add_EncoderServiceServicer_to_server(fake, server)
    port = server.add_insecure_port(f"{host}:{port}")
    server.start()
    try:
        yield Running(fake, f"{host}:{port}", checks, server)
    finally:
        server.stop(0).wait()
        pool.shutdown()


running = entered(lambda: serving(Fake()), scope="function")
