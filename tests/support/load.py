"""Load on a target, by raw stubs without retries, so that every failure shows. Also a program that tests kill."""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from vitwire.v1 import encoder_pb2 as pb
from vitwire.v1.encoder_pb2_grpc import EncoderServiceStub

if TYPE_CHECKING:
    from vitwire.v1.encoder_pb2_grpc import EncoderServiceAsyncStub

COLUMNS = 3 * 2 * 14 * 14
UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


def image(h: int = 2, w: int = 2, *, level: int = 128) -> pb.Item:
    """A grey image of h x w patches, in uint8 without its second frame."""
    data = bytes([level]) * (h * w * COLUMNS // 2)
    tensor = pb.Tensor(data_type=pb.DATA_TYPE_UINT8, shape=[h * w, COLUMNS // 2], data=data)
    return pb.Item(modality=pb.MODALITY_IMAGE, grid=pb.Grid(t=1, h=h, w=w), pixels=tensor)


def request(*items: pb.Item) -> pb.EncodeRequest:
    return pb.EncodeRequest(items=items)


def header(number: int, item: pb.Item) -> tuple[pb.EncodeStreamRequest, bytes]:
    """A header without its bytes, and the bytes."""
    bare = pb.Item()
    bare.CopyFrom(item)
    bare.pixels.data = b""
    return pb.EncodeStreamRequest(header=pb.EncodeStreamHeader(item=number, header=bare)), item.pixels.data


def chunk(number: int, data: bytes) -> pb.EncodeStreamRequest:
    return pb.EncodeStreamRequest(chunk=pb.EncodeStreamChunk(item=number, data=data))


@dataclass
class Tally:
    """Outcomes of calls."""

    codes: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    @property
    def failed(self) -> int:
        return sum(count for code, count in self.codes.items() if code != "OK")

    def percentile(self, share: float) -> float:
        ranked = sorted(self.seconds)
        return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0


async def call(stub: "EncoderServiceAsyncStub", message: pb.EncodeRequest, tally: Tally, timeout: float = 30) -> None:  # noqa: ASYNC109 - the RPC's deadline
    """One Encode; every item must be answered with rows."""
    start = time.monotonic()
    try:
        done = set()
        async for answer in stub.Encode(message, timeout=timeout):
            if answer.HasField("error"):
                tally.codes["ITEM " + grpc_code(answer.error.code)] += 1
                return
            if answer.chunk.last:
                done.add(answer.item)
        complete = len(done) == len(message.items)
        tally.codes["OK" if complete else "INCOMPLETE"] += 1
        tally.seconds.append(time.monotonic() - start)
    except grpc.aio.AioRpcError as error:
        tally.codes[error.code().name] += 1
        tally.reasons[str(error.details())[:80]] += 1


def grpc_code(number: int) -> str:
    return next(code.name for code in grpc.StatusCode if code.value[0] == number)


async def closed(
    target: str, message: pb.EncodeRequest, *, workers: int, calls: int = 0, stop: asyncio.Event | None = None
) -> Tally:
    """Closed loop: each worker has one call at a time; `calls` in total, or until `stop`."""
    tally, left = Tally(), iter(range(calls)) if calls else None

    async def work(stub: "EncoderServiceAsyncStub") -> None:
        while (stop is None or not stop.is_set()) and (left is None or next(left, None) is not None):
            await call(stub, message, tally)

    async with grpc.aio.insecure_channel(target, UNLIMITED) as channel:
        stub = EncoderServiceStub(channel)
        await asyncio.gather(*(work(stub) for _ in range(workers)))
    return tally


async def offered(target: str, message: pb.EncodeRequest, *, rate: float, seconds: float) -> Tally:
    """Open loop: calls at a fixed rate, whatever their outcome."""
    tally, tasks = Tally(), set()
    async with grpc.aio.insecure_channel(target, UNLIMITED) as channel:
        stub, start, sent = EncoderServiceStub(channel), time.monotonic(), 0
        while (elapsed := time.monotonic() - start) < seconds:
            while sent < elapsed * rate:
                sent += 1
                tasks.add(task := asyncio.create_task(call(stub, message, tally)))
                task.add_done_callback(tasks.discard)
            await asyncio.sleep(0.005)
        await asyncio.gather(*tasks)
    return tally


def uploads() -> Iterator[pb.EncodeStreamRequest]:
    """Endless items."""
    for number in range(1 << 30):
        head, data = header(number, image(16, 16))
        yield head
        yield chunk(number, data)


if __name__ == "__main__":  # streams until it is killed
    with grpc.insecure_channel(sys.argv[1], UNLIMITED) as endless:
        for answered in EncoderServiceStub(endless).EncodeStream(uploads()):
            print(answered.item, flush=True)
