"""Bytes of an image to its embedding. Decoding runs in threads, as many images at a time as the limit allows."""

import asyncio
import hashlib
import io
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from PIL import Image, UnidentifiedImageError

from vitwire import AsyncClient, Embedding, InvalidItem, Item, Model
from vitwire._prepare import image_items

T = TypeVar("T")

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""The only ones that are tried on what callers send."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """The bytes of an image file, and their SHA-256."""

    content: bytes
    digest: bytes

    @classmethod
    def of(cls, content: bytes) -> "ImageFile":
        """The file with these bytes."""
        return cls(content, hashlib.sha256(content).digest())


@dataclass(frozen=True, slots=True)
class Encoded:
    """An image's embedding, and the id of its content in the caches of encoder and engine."""

    content_id: str
    embedding: Embedding
    model: Model


class Encoder:
    """Encodes images with Vitwire."""

    def __init__(self, client: AsyncClient, *, max_pixels: int, max_encoding: int, seconds: float) -> None:
        self.max_pixels = max_pixels
        self._seconds = seconds
        self._client = client
        self._slots = asyncio.Semaphore(max_encoding)
        self._threads = ThreadPoolExecutor(os.cpu_count() or 1, "vitwire-images")

    async def encode(self, image: ImageFile, *, cached: bool = False) -> Encoded:
        """The embedding of an image file; `cached` leaves it in the server's cache under its content id.

        Raises VitwireError.
        """
        async with self._slots:
            model = await self._client.model(self._seconds)
            content_id = content_id_of(image.digest, model)
            item = await self.in_thread(lambda: item_of(image.content, model, self.max_pixels))
            if cached:
                item = replace(item, content_id=content_id)
            (embedding,) = await self._client.encode_cached([item], timeout=self._seconds)
        return Encoded(content_id, embedding, model)

    async def in_thread(self, work: Callable[[], T]) -> T:
        """The result of work that would block the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Drop the threads; work that has begun runs to its end."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def item_of(image: bytes, model: Model, max_pixels: int) -> Item:
    """The only place where an image file becomes an item. Raises InvalidItem."""
    open_image(image, max_pixels)
    (item,) = image_items([image], model)
    return item


def open_image(image: bytes, max_pixels: int) -> str:
    """The format of an image file, by its header. Raises InvalidItem for other files and for too many pixels."""
    try:
        with Image.open(io.BytesIO(image), formats=_FORMATS) as opened:
            (width, height), kind = opened.size, opened.format
    except UnidentifiedImageError as error:
        raise InvalidItem("not a JPEG, PNG, WebP, GIF or BMP image", item=0) from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Warning) as error:
        raise InvalidItem(f"cannot be read as an image: {error}", item=0) from error
    if width * height > max_pixels:
        raise InvalidItem(f"{width}x{height} exceeds the limit of {max_pixels} pixels", item=0)
    return kind or ""


def content_id_of(digest: bytes, model: Model) -> str:
    """An id that equal images have under equal weights and preprocessing, and no others."""
    recipe = f"{model.weights_fingerprint} {model.dtype} {model.image_preprocessor!r}".encode()
    return hashlib.sha256(hashlib.sha256(recipe).digest() + digest).hexdigest()
