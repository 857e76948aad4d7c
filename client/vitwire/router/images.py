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
from vitwire.router.reading import ChatRequest, Source
from vitwire.router.shares import Caller

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
    seconds: float

    def serving(self, caller: Caller, metadata: Mapping[str, str]) -> "Images":
        """The same for a request, with metadata for the encoder's logs and traces."""
        return replace(self, encoder=self.encoder.serving(caller, metadata))

    async def parts(self, request: ChatRequest, ticket: Ticket) -> list[Part]:
        """The engine's part for each image, in order; equal images are encoded once. Raises ApiError."""
        first: dict[int, str] = {}
        for place in request.places:
            first.setdefault(place.source, place.param)
        try:
            async with asyncio.timeout(self.seconds):
                images = await _each(lambda key: self._load(request.sources[key], first[key], ticket), first)
                equal: dict[bytes, int] = {}
                for key, image in images.items():
                    equal.setdefault(image.digest, key)
                parts = await _each(lambda key: self._part(images[key], first[key], ticket), equal.values())
        except TimeoutError as error:
            raise ApiError(504, f"the images took longer than {self.seconds:g} s", "images_timeout") from error
        return [parts[equal[images[place.source].digest]] for place in request.places]

    async def _load(self, source: Source, param: str, ticket: Ticket) -> ImageFile:
        image = source.content
        try:
            if isinstance(image, ApiError):
                raise image
            if isinstance(image, str):
                image = await self.fetcher.fetch(image, param, ticket.hold)
            else:
                ticket.hold(len(image))
        except ApiError:
            self.metrics.images.labels(source.kind, "refused").inc()
            raise
        self.metrics.images.labels(source.kind, "loaded").inc()
        return await self.encoder.in_thread(lambda: ImageFile.of(image))

    async def _part(self, image: ImageFile, param: str, ticket: Ticket) -> Part:
        try:
            part = await self.dialect.part(image, self.encoder)
        except VitwireError as error:
            raise from_encoder(error, param) from error
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
