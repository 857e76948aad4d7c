"""Bytes of an image to its embedding: as many images at a time as the limit allows, by turns of the callers."""

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TypeVar

from vitwire import AsyncClient, DType, Embedding, Item, Model, NotCached, VitwireError
from vitwire.wire import Buffer
from vitwire_gateway.openai.errors import ApiError
from vitwire_gateway.openai.reading import Header, header_of, item_of
from vitwire_gateway.openai.shares import Caller, Turns
from vitwire_gateway.openai.storing import Referenced, Stores
from vitwire_gateway.openai.workers import Workers

T = TypeVar("T")

_DESCRIPTION_SECONDS = 2.0
"""Less than a server takes to restart, so that its new weights never get content ids of the old ones."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """The bytes of an image file, and their SHA-256."""

    content: bytes
    digest: bytes

    @classmethod
    def of(cls, content: Buffer) -> "ImageFile":
        """The file with these bytes."""
        return cls(bytes(content), hashlib.sha256(content).digest())


@dataclass(frozen=True, slots=True)
class Encoded:
    """An image's embedding, and the id of its content in the engine's caches."""

    content_id: str
    embedding: Embedding
    model: Model


@dataclass(slots=True)
class Description:
    """The encoder's model, requested again when it is older than `_DESCRIPTION_SECONDS`."""

    client: AsyncClient
    seconds: float | None
    _model: Model | None = None
    _until: float = 0.0
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def current(self) -> Model:
        """Raises VitwireError."""
        async with self._lock:
            if self._model is None or time.monotonic() >= self._until:
                self._model = await self.client.model(self.seconds, refresh=True)
                self._until = time.monotonic() + _DESCRIPTION_SECONDS
            return self._model


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encodes images with Vitwire."""

    client: AsyncClient
    description: Description
    max_pixels: int
    seconds: float | None
    """Time limit of each call to the server; None for the client's."""
    turns: Turns
    workers: Workers
    threads: ThreadPoolExecutor
    """For work that takes milliseconds."""
    caller: Caller
    stores: Stores
    """Of one request, which ends them."""

    @classmethod
    def of(
        cls,
        client: AsyncClient,
        workers: Workers,
        *,
        max_pixels: int,
        max_encoding: int,
        seconds: float | None = None,
    ) -> "Encoder":
        """An encoder with threads; max_encoding: images that are read and encoded at a time."""
        return cls(
            client,
            Description(client, seconds),
            max_pixels,
            seconds,
            Turns(max_encoding),
            workers,
            ThreadPoolExecutor(os.cpu_count() or 1, "vitwire-images"),
            Caller.of("anybody"),
            Stores(),
        )

    def serving(self, caller: Caller, metadata: Mapping[str, str] | None = None) -> "Encoder":
        """The same encoder for a request, whose calls carry this metadata."""
        client = self.client.with_options(metadata=metadata) if metadata else self.client
        return replace(self, client=client, caller=caller, stores=Stores())

    async def encode(self, image: ImageFile, *, output_type: DType | None = None) -> Encoded:
        """The embedding of an image file.

        Raises VitwireError, or ApiError if no worker is left, or the server prepares no images.
        """
        async with self.turns.turn(self.caller):
            model = await self.description.current()
            item = await self._item(image, model)
            (embedding,) = await self.client.encode([item], timeout=self.seconds, output_type=output_type)
        return Encoded(content_id_of(image.digest, model), embedding, model)

    async def store(self, image: ImageFile) -> Referenced:
        """Let the server cache the embedding of an image file: returns as soon as requests for it wait for it.

        The rest happens in `stores`. Raises VitwireError, or ApiError if no worker is left, or the server has no
        cache or prepares no images.
        """
        return await self.stores.begin(image.digest, lambda accept: self._store(image, accept))

    async def check_stored(self, image: ImageFile, *, still: bool) -> None:
        """Wait until an image that the server accepted is stored. Raises as `store`.

        still: raises also if the server does not have it any more.
        """
        content_id = await self.stores.ended(image.digest)
        if content_id and still:
            await self.client.store([Item(content_id=content_id)], timeout=self.seconds)

    async def _store(self, image: ImageFile, accept: Callable[[Referenced], None]) -> str:
        async with self.turns.turn(self.caller):
            model = await self.description.current()
            if not model.limits.cached_bytes:
                message = "the encoder keeps no embeddings: --mode reference needs --cache-bytes on every server"
                raise ApiError(502, message, "encoder_without_cache")
            content_id = content_id_of(image.digest, model)
            try:
                (stored,) = await self.client.store([Item(content_id=content_id)], timeout=self.seconds)
            except NotCached:
                item = replace(await self._item(image, model), content_id=content_id)
                async with aclosing(self.client.iter_store([item], timeout=self.seconds)) as answers:
                    async for _, answer in answers:
                        if isinstance(answer, VitwireError):
                            raise answer from None
                        accept(Referenced(content_id, answer.grid, model))
            else:
                accept(Referenced(content_id, stored.grid, model))
        return content_id

    async def _item(self, image: ImageFile, model: Model) -> Item:
        if "image" not in model.prepared:
            message = (
                f"the encoder prepares no images of {model.model_type}: it needs --decode-processes above 0 on every "
                "server, and a model whose images servers prepare"
            )
            raise ApiError(502, message, "encoder_without_decoders")
        return await item_of(self.workers, self.caller, image.content, self.max_pixels)

    async def header(self, image: ImageFile) -> Header:
        """The header of an image file. Raises InvalidItem, or ApiError if no worker is left."""
        return await header_of(self.workers, self.caller, image.content, self.max_pixels)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """The result of work that would block the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

    def close(self) -> None:
        """Drop the threads; work that has begun runs to its end."""
        self.threads.shutdown(wait=False, cancel_futures=True)


def content_id_of(digest: bytes, model: Model) -> str:
    """An id that equal images have under equal weights and preparation, and no others."""
    recipe = f"{model.weights_fingerprint} {model.dtype} {model.preparation_fingerprint}".encode()
    return hashlib.sha256(hashlib.sha256(recipe).digest() + digest).hexdigest()
