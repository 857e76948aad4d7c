"""Bytes of an image to its embedding. Decoding runs in threads, as many images at a time as the limit allows."""

import asyncio
import hashlib
import io
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from PIL import Image, UnidentifiedImageError

from vitwire import AsyncClient, DType, Embedding, InvalidItem, Item, Model, NotCached
from vitwire._items import without_pixels
from vitwire._prepare import image_items
from vitwire.router.errors import ApiError

T = TypeVar("T")

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""The only ones that are tried on what callers send."""
_DESCRIPTION_SECONDS = 2.0
"""Less than a server takes to restart, so that its new weights never get content ids of the old ones."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """The bytes of an image file, and their SHA-256."""

    content: bytes
    digest: bytes

    @classmethod
    def of(cls, content: bytes) -> "ImageFile":
        """The file with these bytes."""
        return cls(content, hashlib.sha256(content).digest())


class Header(NamedTuple):
    """What the first bytes of an image file say."""

    kind: str
    """Pillow's name of the format."""
    pixels: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """An image's embedding, and the id of its content in the caches of encoder and engine."""

    content_id: str
    embedding: Embedding
    model: Model


@dataclass(slots=True)
class Description:
    """The encoder's model, requested again when it is older than `_DESCRIPTION_SECONDS`."""

    client: AsyncClient
    seconds: float | None
    caching: set[str] = field(default_factory=set)
    """Fingerprints of the weights under which an embedding was found in the server's cache."""
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
    at_encoder: bool
    """Whether the server decodes files, where it can."""
    slots: asyncio.Semaphore
    threads: ThreadPoolExecutor

    @classmethod
    def of(
        cls,
        client: AsyncClient,
        *,
        max_pixels: int,
        max_encoding: int,
        seconds: float | None = None,
        at_encoder: bool = True,
    ) -> "Encoder":
        """An encoder with threads of its own; max_encoding: images that are decoded and encoded at a time."""
        return cls(
            client,
            Description(client, seconds),
            max_pixels,
            seconds,
            at_encoder,
            asyncio.Semaphore(max_encoding),
            ThreadPoolExecutor(os.cpu_count() or 1, "vitwire-images"),
        )

    def with_metadata(self, metadata: Mapping[str, str]) -> "Encoder":
        """The same encoder, whose calls carry this metadata."""
        return replace(self, client=self.client.with_options(metadata=metadata))

    async def encode(self, image: ImageFile, *, cached: bool = False, output_type: DType | None = None) -> Encoded:
        """The embedding of an image file; `cached` leaves it in the server's cache under its content id.

        Raises VitwireError, or ApiError if `cached` and the server has no cache.
        """
        async with self.slots:
            model = await self.description.current()
            content_id = content_id_of(image.digest, model)
            item = await self.in_thread(
                lambda: item_of(image.content, model, self.max_pixels, at_encoder=self.at_encoder)
            )
            if cached:
                item = replace(item, content_id=content_id)
            (embedding,) = await self.client.encode_cached([item], self.seconds, output_type)
            if cached and model.weights_fingerprint not in self.description.caching:
                await self._check_cached(item)
                self.description.caching.add(model.weights_fingerprint)
        return Encoded(content_id, embedding, model)

    async def _check_cached(self, item: Item) -> None:
        """Raises ApiError if the server did not keep the embedding of an item that it has just encoded."""
        try:
            await self.client.encode([without_pixels(item)], timeout=self.seconds)
        except NotCached as error:
            message = "the encoder did not keep an embedding: --mode reference needs --cache-bytes on every server"
            raise ApiError(502, message, "encoder_without_cache") from error

    async def in_thread(self, work: Callable[[], T]) -> T:
        """The result of work that would block the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

    def close(self) -> None:
        """Drop the threads; work that has begun runs to its end."""
        self.threads.shutdown(wait=False, cancel_futures=True)


def item_of(image: bytes, model: Model, max_pixels: int, *, at_encoder: bool = False) -> Item:
    """The only place where an image file becomes an item. Raises InvalidItem.

    at_encoder: leave decoding to the server if it decodes this kind of file, and of this size.
    """
    header = open_image(image, max_pixels)
    if at_encoder and _is_decoded(header, len(image), model):
        return Item(encoded=image)
    (item,) = image_items([image], model)
    return item


def _is_decoded(header: Header, size: int, model: Model) -> bool:
    limits = model.limits
    return (
        header.kind.lower() in model.encodings
        and size <= limits.encoded_bytes
        and header.pixels <= limits.encoded_pixels
    )


def open_image(image: bytes, max_pixels: int) -> Header:
    """The header of an image file. Raises InvalidItem for other files and for too many pixels."""
    try:
        with Image.open(io.BytesIO(image), formats=_FORMATS) as opened:
            (width, height), kind = opened.size, opened.format or ""
    except UnidentifiedImageError as error:
        raise InvalidItem("not a JPEG, PNG, WebP, GIF or BMP image", item=0) from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Warning) as error:
        raise InvalidItem(f"cannot be read as an image: {error}", item=0) from error
    if width * height > max_pixels:
        raise InvalidItem(f"{width}x{height} exceeds the limit of {max_pixels} pixels", item=0)
    return Header(kind, width * height)


def content_id_of(digest: bytes, model: Model) -> str:
    """An id that equal images have under equal weights and preprocessing, and no others."""
    recipe = f"{model.weights_fingerprint} {model.dtype} {model.image_preprocessor!r}".encode()
    return hashlib.sha256(hashlib.sha256(recipe).digest() + digest).hexdigest()
