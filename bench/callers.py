"""What makes a benchmark's calls: the client, in threads of `vitwire bench`, and grpc.aio alone on an event loop."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import grpc.aio
from bench.echo import ANSWER, UNLIMITED
from bench.images import Messages, images_of, serialised

from vitwire import Client, Embedding, Item, Model
from vitwire_cli.bench.load import Load, Pace, Sample
from vitwire_cli.bench.workload import Workload

Row = dict[str, Any]
_CHANNEL = (*UNLIMITED, ("grpc.use_local_subchannel_pool", 1))
_DISTINCT = 4
"""Requests that are sent in turn."""


@dataclass(frozen=True, slots=True)
class Work:
    """What each call sends: one image."""

    size: str
    """Pixels on each side of a square image, or a name of `images.SIZES`."""
    pixels: str = "uint8"
    """What is sent: one of `images.PIXELS`."""
    answer: Sequence[int] = ()
    """Sizes of the messages to ask of a bare server; empty for a service."""


class Caller(ABC):
    """Makes calls of one kind."""

    @abstractmethod
    def prepare(self, work: Work) -> Row:
        """Draw the images and make one call; returns the bytes and rows of a call."""

    @abstractmethod
    def run(self, pace: Pace) -> Row:
        """Make calls; returns `_ended`."""


class SyncClient(Caller):
    """The client, with a thread for each call in flight; `delivery` and `device` as it takes them."""

    def __init__(self, target: str, delivery: str = "", device: str | None = None) -> None:
        where: Row = {"delivery": delivery, "device": device} if delivery else {}
        self._client = Client(target, timeout=120, **where)
        self._reads = delivery == "nixl"
        self._requests: list[list[Item]] = []

    def prepare(self, work: Work) -> Row:
        self._requests, described = _drawn(self._client, work)
        return described

    def run(self, pace: Pace) -> Row:
        load = Load(cast("Client", self), Workload(self._requests), pace, fresh=False)
        load.run()
        return _ended(load._began, load.samples)  # of `perf_counter`, which on Linux is the monotonic clock

    def model(self) -> Model:
        return self._client.model()

    def iter_encode(self, items: Sequence[Item], *, groups: bool) -> Iterator[tuple[int, Embedding]]:
        """Rows that others wrote into our memory are read; the client has read all that it received."""
        for position, rows in self._client.iter_encode(items, groups=groups):
            if self._reads:
                rows.torch()[-1, -1].item()
            yield position, rows


class Raw(Caller):
    """grpc.aio alone: the client's messages, serialised beforehand, and answers that are only counted."""

    def __init__(self, target: str, model: str = "", connections: int = 1) -> None:
        """`model` is the target whose model the images are for; without it, `target` itself."""
        self._loop = asyncio.new_event_loop()
        self._model = model or target
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._sizes: list[int] = []
        self._channels = self._loop.run_until_complete(self._opened(target, connections))

    async def _opened(self, target: str, connections: int) -> list[grpc.aio.Channel]:
        addresses = target.removeprefix("ipv4:").split(",")
        return [grpc.aio.insecure_channel(each, _CHANNEL) for each in addresses for _ in range(connections)]

    def prepare(self, work: Work) -> Row:
        with Client(self._model) as client:
            requests, described = _drawn(client, work)
            self._requests: list[Messages] = [serialised(each, client.model()) for each in requests]
        self._metadata = ((ANSWER, ",".join(map(str, work.answer))),) if work.answer else ()
        self._sizes = self._loop.run_until_complete(self._exchange(0))
        for number in range(1, 2 * len(self._channels)):
            self._loop.run_until_complete(self._exchange(number))
        return described | {"answer": self._sizes}

    def run(self, pace: Pace) -> Row:
        return self._loop.run_until_complete(self._run(pace))

    async def _run(self, pace: Pace) -> Row:
        """A task for each call in flight."""
        began = time.monotonic()
        samples: list[Sample] = []
        numbers = count()

        async def work() -> None:
            while (start := time.monotonic() - began) < pace.seconds:
                error = await self._call(next(numbers))
                samples.append(Sample(start, time.monotonic() - began, error=error))

        await asyncio.gather(*(work() for _ in range(pace.concurrency)))
        return _ended(began, samples)

    async def _call(self, number: int) -> str:
        """Make one call; returns the code of its error, or nothing."""
        try:
            sizes = await self._exchange(number)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return "" if len(sizes) >= len(self._sizes) else "SHORT"

    async def _exchange(self, number: int) -> list[int]:
        """One call; returns the sizes of the messages of its answer."""
        request = self._requests[number % len(self._requests)]
        channel = self._channels[number % len(self._channels)]
        if len(request.messages) == 1:
            one: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(request.path, None, None)
            return [len(raw) async for raw in one(request.messages[0], metadata=self._metadata)]
        many: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(request.path, None, None)
        return [len(raw) async for raw in many(iter(request.messages), metadata=self._metadata)]


def _drawn(client: Client, work: Work) -> tuple[list[list[Item]], Row]:
    """Requests, the first of which was made; and the bytes and rows of a call."""
    model = client.model()
    requests = [[image] for image in images_of(client, work.size, work.pixels, range(_DISTINCT))]
    tokens = sum(each.shape[0] for each in client.encode(requests[0]))
    down = tokens * model.embedding_width * (4 if model.dtype == "float32" else 2)
    return requests, {"up": serialised(requests[0], model).nbytes, "down": down, "tokens": tokens, "answer": []}


def _ended(began: float, samples: Sequence[Sample]) -> Row:
    """When each call ended, by the monotonic clock, and its seconds and error; samples count from `began`."""
    return {
        "at": [began + sample.done for sample in samples],
        "seconds": [sample.latency for sample in samples],
        "error": [sample.error for sample in samples],
    }
