"""The kinds of clients: the library, the library for asyncio, grpc.aio alone, and health checks."""

import grpc.aio
from bench.calls import Pace, Row, Tasks, Threads, Work
from bench.echo import ANSWER, UNLIMITED, write_sizes
from bench.images import Messages, images_of, serialised

from vitwire import AsyncClient, Client, Embedding, VitwireError

_CHANNEL = (*UNLIMITED, ("grpc.use_local_subchannel_pool", 1))


class OfClient(Threads):
    """The synchronous client; `delivery` and `device` as it takes them."""

    def __init__(self, target: str, delivery: str = "", device: str | None = None) -> None:
        where: Row = {"delivery": delivery, "device": device} if delivery else {}
        self._client = Client(target, timeout=120, **where)
        self._touched = delivery == "nixl"

    def prepare(self, work: Work) -> Row:
        model = self._client.model()
        images = images_of(self._client, work.size or str(work.side), work.pixels, range(work.distinct * work.images))
        self._requests = [images[at : at + work.images] for at in range(0, len(images), work.images)]
        embeddings = self._client.encode(self._requests[0])
        rows = sum(each.shape[0] for each in embeddings)
        width = rows * model.embedding_width * (4 if model.dtype == "float32" else 2)
        return {"up": serialised(self._requests[0], model).nbytes, "down": width, "tokens": rows, "answer": []}

    def call(self, number: int) -> str:
        try:
            for embedding in self._client.encode(self._requests[number % len(self._requests)]):
                self._touch(embedding)
        except VitwireError as error:
            return error.code
        return ""

    def _touch(self, embedding: Embedding) -> None:
        """Read one value of rows that others wrote into our memory; the client has read all that it received."""
        if self._touched:
            embedding.torch()[-1, -1].item()

    def close(self) -> None:
        self._client.close()


class OfAsyncClient(Tasks):
    """The client for asyncio."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self._target = target
        self._client = self._loop.run_until_complete(self._opened())

    async def _opened(self) -> AsyncClient:
        return AsyncClient(self._target, timeout=120)

    def prepare(self, work: Work) -> Row:
        with_threads = OfClient(self._target)
        described = with_threads.prepare(work)
        self._requests = with_threads._requests
        with_threads.close()
        self.run(Pace(calls=1))
        return described

    async def call(self, number: int) -> str:
        try:
            await self._client.encode(self._requests[number % len(self._requests)])
        except VitwireError as error:
            return error.code
        return ""

    def close(self) -> None:
        self._loop.run_until_complete(self._client.close())


class Raw(Tasks):
    """grpc.aio alone: the client's messages, serialised beforehand, and answers that are only counted.

    With `bare`, a target that has no model and echoes as much as it is asked.
    """

    def __init__(self, target: str, model: str = "", connections: int = 1) -> None:
        """`model` is the target whose model the images are for; without it, `target` itself."""
        super().__init__()
        self._model = model or target
        self._metadata: tuple[tuple[str, str], ...] = ()
        self._sizes: list[int] = []
        self._channels = self._loop.run_until_complete(self._opened(target, connections))

    async def _opened(self, target: str, connections: int) -> list[grpc.aio.Channel]:
        addresses = target.removeprefix("ipv4:").split(",")
        return [grpc.aio.insecure_channel(each, _CHANNEL) for each in addresses for _ in range(connections)]

    def prepare(self, work: Work) -> Row:
        with Client(self._model) as client:
            model = client.model()
            images = images_of(client, work.size or str(work.side), work.pixels, range(work.distinct * work.images))
            tokens = sum(each.shape[0] for each in client.encode(images[: work.images]))
        self._requests: list[Messages] = [
            serialised(images[i : i + work.images], model) for i in range(0, len(images), work.images)
        ]
        self._metadata = ((ANSWER, write_sizes(work.answer)),) if work.answer else ()
        self._sizes = list(work.answer)
        self._sizes = self._loop.run_until_complete(self._exchange(0))
        down = tokens * model.embedding_width * (4 if model.dtype == "float32" else 2)
        for number in range(1, 2 * len(self._channels)):
            self._loop.run_until_complete(self._exchange(number))
        return {"up": self._requests[0].nbytes, "down": down, "tokens": tokens, "answer": self._sizes}

    def close(self) -> None:
        """The process ends."""

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


class Health(Threads):
    """Health checks."""

    def __init__(self, target: str) -> None:
        self._client = Client(target)

    def prepare(self, work: Work) -> Row:  # noqa: ARG002
        self._client.health()
        return {"up": 0, "down": 0, "tokens": 0, "answer": []}

    def call(self, number: int) -> str:  # noqa: ARG002
        try:
            return "" if self._client.health(timeout=30) == "SERVING" else "NOT_SERVING"
        except VitwireError as error:
            return error.code

    def close(self) -> None:
        self._client.close()
