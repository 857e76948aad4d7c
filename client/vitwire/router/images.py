"""The images of one request: their bytes, embeddings, and the engine's content parts."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from vitwire import VitwireError
from vitwire.router.admission import Ticket
from vitwire.router.dialects import Dialect, Part
from vitwire.router.encoding import Encoder, ImageFile
from vitwire.router.errors import ApiError, from_encoder
from vitwire.router.fetching import Fetcher
from vitwire.router.metrics import Metrics
from vitwire.router.rewriting import ImageRef
from vitwire.router.uploads import decode_data_uri, too_large, upload

K = TypeVar("K")
T = TypeVar("T")

_MAX_AT_ONCE = 8
"""Images of one request that are fetched or encoded at a time."""


@dataclass(frozen=True, slots=True)
class Images:
    """Turns images of requests into content parts."""

    encoder: Encoder
    fetcher: Fetcher
    dialect: Dialect
    metrics: Metrics
    max_bytes: int
    seconds: float

    def traced(self, metadata: Mapping[str, str]) -> "Images":
        """The same, with metadata for the encoder's logs and traces."""
        return replace(self, encoder=self.encoder.with_metadata(metadata))

    async def parts(self, refs: Iterable[ImageRef], files: Mapping[str, bytes], ticket: Ticket) -> dict[ImageRef, Part]:
        """The engine's content part for each image; equal images are encoded once. Raises ApiError."""
        refs = list(refs)
        try:
            async with asyncio.timeout(self.seconds):
                images = await self._load_all(refs, files, ticket)
                first = {images[ref.url].digest: ref for ref in reversed(refs)}
                parts = await _each(lambda digest: self._part(images[first[digest].url], first[digest], ticket), first)
        except TimeoutError as error:
            raise ApiError(504, f"the images took longer than {self.seconds:g} s", "images_timeout") from error
        return {ref: parts[images[ref.url].digest] for ref in refs}

    async def _load_all(
        self, refs: Iterable[ImageRef], files: Mapping[str, bytes], ticket: Ticket
    ) -> dict[str, ImageFile]:
        """The image at each URL."""
        first: dict[str, ImageRef] = {}
        for ref in refs:
            first.setdefault(ref.url, ref)
        return await _each(lambda url: self._load(first[url], files, ticket), first)

    async def _load(self, ref: ImageRef, files: Mapping[str, bytes], ticket: Ticket) -> ImageFile:
        scheme = ref.url[:8].partition(":")[0].lower()
        source = {"data": "data", "upload": "upload"}.get(scheme, "url")
        try:
            if source == "data":
                image = await self.encoder.in_thread(lambda: decode_data_uri(ref.url, self.max_bytes, ref.param))
            elif source == "upload":
                image = upload(ref.url, files, ref.param)
            else:
                image = await self.fetcher.fetch(ref.url, ref.param, ticket.hold)
            if len(image) > self.max_bytes:
                raise too_large(self.max_bytes, ref.param)
            if source != "url":
                ticket.hold(len(image))
        except ApiError:
            self.metrics.images.labels(source, "refused").inc()
            raise
        self.metrics.images.labels(source, "loaded").inc()
        return await self.encoder.in_thread(lambda: ImageFile.of(image))

    async def _part(self, image: ImageFile, ref: ImageRef, ticket: Ticket) -> Part:
        try:
            part = await self.dialect.part(image, self.encoder)
        except VitwireError as error:
            raise from_encoder(error, ref.param) from error
        except ValueError as error:
            raise ApiError(
                502, f"the engine has no input for this model's images: {error}", "unsupported_model"
            ) from error
        ticket.hold(sum(len(value) for value in _strings(part)))
        return part


async def _each(work: Callable[[K], Coroutine[None, None, T]], keys: Iterable[K]) -> dict[K, T]:
    """The results by key, a few at a time; the first error cancels the rest."""
    slots = asyncio.Semaphore(_MAX_AT_ONCE)

    async def one(key: K) -> T:
        async with slots:
            return await work(key)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = {key: group.create_task(one(key)) for key in keys}
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return {key: task.result() for key, task in tasks.items()}


def _strings(part: object) -> Iterable[str]:
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict):
        for value in part.values():
            yield from _strings(value)
