"""What makes a benchmark's calls: the client, the client for asyncio, grpc.aio alone, and health checks.

Threads are started by the load engine of `vitwire bench` (`vitwire_cli/bench/load.py`); what runs on an event loop
records the same samples.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import grpc.aio
from bench.echo import ANSWER, UNLIMITED, write_sizes
from bench.images import Messages, images_of, serialised

from vitwire import AsyncClient, Client, Embedding, Item, Unavailable, VitwireError
from vitwire_cli.bench.load import Load, Pace, Sample
from vitwire_cli.bench.workload import Workload

Row = dict[str, Any]
_CHANNEL = (*UNLIMITED, ("grpc.use_local_subchannel_pool", 1))


@dataclass(frozen=True, slots=True)
class Work:
    """What each call sends: `images` images of one size, of `distinct` requests in turn."""

    side: int = 0
    """Pixels on each side of the square images."""
    size: str = ""
    """A name of `images.SIZES`, instead of a side."""
    pixels: str = "uint8"
    """What is sent: one of `images.PIXELS`."""
    images: int = 1
    distinct: int = 4
    answer: Sequence[int] = ()
    """Sizes of the messages to ask of a bare server; empty for a service."""


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls that ended."""

    began: float
    """Seconds of the monotonic clock from which the samples count."""
    samples: Sequence[Sample]


class Caller(ABC):
    """Makes calls of one kind."""

    @abstractmethod
    def prepare(self, work: Work) -> Row:
        """Draw the images and make one call; returns the bytes and rows of a call."""

    @abstractmethod
    def run(self, pace: Pace, pause: float) -> Calls:
        """Make calls; `pause` is in seconds, between the end of a call and the start of the next one."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Close connections."""


class Threads(Caller):
    """A thread for each call in flight."""

    requests: Sequence[Sequence[Item]] = ((),)

    @abstractmethod
    def encode(self, items: Sequence[Item]) -> Sequence[Embedding]:
        """Make one call. Raises VitwireError."""

    def run(self, pace: Pace, pause: float) -> Calls:
        """A pause holds up all threads, so it is for one call in flight."""
        load = Load(cast("Client", self), Workload(self.requests), pace, fresh=False)
        if pause:
            load.on_sample = lambda _: time.sleep(pause)
        load.run()
        return Calls(load._began, load.samples)  # of `perf_counter`, which on Linux is the monotonic clock


class SyncClient(Threads):
    """The synchronous client; `delivery` and `device` as it takes them."""

    def __init__(self, target: str, delivery: str = "", device: str | None = None) -> None:
        where: Row = {"delivery": delivery, "device": device} if delivery else {}
        self._client = Client(target, timeout=120, **where)
        self._reads = delivery == "nixl"

    def prepare(self, work: Work) -> Row:
        self.requests, described = _drawn(self._client, work)
        return described

    def encode(self, items: Sequence[Item]) -> Sequence[Embedding]:
        """Rows that others wrote into our memory are read; the client has read all that it received."""
        embeddings = self._client.encode(items)
        if self._reads:
            for each in embeddings:
                each.torch()[-1, -1].item()
        return embeddings

    def close(self) -> None:
        self._client.close()


class Health(Threads):
    """Health checks."""

    def __init__(self, target: str) -> None:
        self._client = Client(target)

    def prepare(self, work: Work) -> Row:  # noqa: ARG002
        self._client.health()
        return {"up": 0, "down": 0, "tokens": 0, "answer": []}

    def encode(self, items: Sequence[Item]) -> Sequence[Embedding]:  # noqa: ARG002
        if (status := self._client.health(timeout=30)) != "SERVING":
            raise Unavailable(status, code=status)
        return ()

    def close(self) -> None:
        self._client.close()


class Tasks(Caller):
    """A task for each call in flight, on an event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()

    @abstractmethod
    async def call(self, number: int) -> str:
        """Make one call; returns the code of its error, or nothing."""

    def run(self, pace: Pace, pause: float) -> Calls:
        assert not pause, "only threads pause"
        return self.loop.run_until_complete(self._run(pace))

    async def _run(self, pace: Pace) -> Calls:
        began = time.monotonic()
        samples: list[Sample] = []
        numbers = iter(range(pace.requests if pace.requests is not None else 1 << 62))

        async def work() -> None:
            while (start := time.monotonic() - began) < pace.seconds and (number := next(numbers, None)) is not None:
                error = await self.call(number)
                samples.append(Sample(start, time.monotonic() - began, error=error))

        await asyncio.gather(*(work() for _ in range(pace.concurrency)))
        return Calls(began, samples)


class AsyncioClient(Tasks):
    """The client for asyncio."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self._target = target
        self._client = self.loop.run_until_complete(self._opened())

    async def _opened(self) -> AsyncClient:
        return AsyncClient(self._target, timeout=120)

    def prepare(self, work: Work) -> Row:
        with Client(self._target) as client:
            self._requests, described = _drawn(client, work)
        self.loop.run_until_complete(self.call(0))
        return described

    async def call(self, number: int) -> str:
        try:
            await self._client.encode(self._requests[number % len(self._requests)])
        except VitwireError as error:
            return error.code
        return ""

    def close(self) -> None:
        self.loop.run_until_complete(self._client.close())


class Raw(Tasks):
    """grpc.aio alone: the client's messages, serialised beforehand, and answers that are only counted."""

    def __init__(self, target: str, model: str = "", connections: int = 1) -> None:
        """`model` is the target whose model the images are for; without it, `target` itself."""
        super().__init__()
        self._model = model or target
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._sizes: list[int] = []
        self._channels = self.loop.run_until_complete(self._opened(target, connections))

    async def _opened(self, target: str, connections: int) -> list[grpc.aio.Channel]:
        addresses = target.removeprefix("ipv4:").split(",")
        return [grpc.aio.insecure_channel(each, _CHANNEL) for each in addresses for _ in range(connections)]

    def prepare(self, work: Work) -> Row:
        with Client(self._model) as client:
            requests, described = _drawn(client, work)
            self._requests: list[Messages] = [serialised(each, client.model()) for each in requests]
        self._metadata = ((ANSWER, write_sizes(work.answer)),) if work.answer else ()
        self._sizes = self.loop.run_until_complete(self._exchange(0))
        for number in range(1, 2 * len(self._channels)):
            self.loop.run_until_complete(self._exchange(number))
        return described | {"answer": self._sizes}

    async def call(self, number: int) -> str:
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
    images = images_of(client, work.size or str(work.side), work.pixels, range(work.distinct * work.images))
    requests = [images[at : at + work.images] for at in range(0, len(images), work.images)]
    tokens = sum(each.shape[0] for each in client.encode(requests[0]))
    down = tokens * model.embedding_width * (4 if model.dtype == "float32" else 2)
    return requests, {"up": serialised(requests[0], model).nbytes, "down": down, "tokens": tokens, "answer": []}
