"""The images of one request: their bytes, embeddings, and the engine's content parts."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from vitwire import VitwireError
from vitwire_gateway.openai.admission import Ticket
from vitwire_gateway.openai.dialects import Dialect, Part, Unchanged
from vitwire_gateway.openai.encoding import Encoder, ImageFile
from vitwire_gateway.openai.errors import ApiError, from_encoder
from vitwire_gateway.openai.fetching import Fetcher
from vitwire_gateway.openai.metrics import Metrics
from vitwire_gateway.openai.reading import ChatRequest, Source
from vitwire_gateway.openai.shares import Caller

K = TypeVar("K")
T = TypeVar("T")

_MAX_AT_ONCE = 8
"""Images of one request that are fetched or encoded at a time."""


class Loaded(NamedTuple):
    """The image files of a request, equal ones once."""

    files: Sequence[ImageFile]
    params: Sequence[str]
    """The name of each file in errors."""
    order: Sequence[int]
    """For each image of the request, its file."""
    until: float
    """When all images must be encoded, on the loop's clock."""


@dataclass(frozen=True, slots=True)
class Images:
    """Turns images of requests into content parts."""

    encoder: Encoder
    fetcher: Fetcher
    dialect: Dialect
    metrics: Metrics
    seconds: float
    """To load and encode the images of a request."""
    wait: float
    """Of these, for the encoder."""

    def serving(self, caller: Caller, metadata: Mapping[str, str]) -> "Images":
        """The same for a request, with metadata for the encoder's logs and traces."""
        return replace(self, encoder=self.encoder.serving(caller, metadata))

    async def load(self, request: ChatRequest, ticket: Ticket) -> Loaded:
        """The image files of a request. Raises ApiError."""
        until = asyncio.get_running_loop().time() + self.seconds
        first: dict[int, str] = {}
        for place in request.places:
            first.setdefault(place.source, place.param)
        try:
            async with asyncio.timeout_at(until):
                images = await _each(lambda key: self._load(request.sources[key], first[key], ticket), first)
        except TimeoutError as error:
            raise ApiError(504, f"the images took longer than {self.seconds:g} s", "images_timeout") from error
        equal: dict[bytes, int] = {}
        for key, image in images.items():
            equal.setdefault(image.digest, key)
        numbers = {digest: number for number, digest in enumerate(equal)}
        order = [numbers[images[place.source].digest] for place in request.places]
        return Loaded([images[key] for key in equal.values()], [first[key] for key in equal.values()], order, until)

    async def parts(self, loaded: Loaded, ticket: Ticket) -> list[Part]:
        """The engine's part for each image of the request, in order. Raises ApiError."""
        until = min(loaded.until, asyncio.get_running_loop().time() + self.wait)
        try:
            async with asyncio.timeout_at(until):
                return await self._parts(loaded, self.dialect, ticket)
        except TimeoutError as error:
            raise ApiError(504, "the encoder did not answer in time", "encoder_timeout") from error

    async def unchanged(self, loaded: Loaded, ticket: Ticket) -> list[Part]:
        """The same with the images themselves, for the engine to encode. Raises ApiError."""
        return await self._parts(loaded, Unchanged(), ticket)

    async def check_stored(self, loaded: Loaded, *, still: bool) -> None:
        """Wait until the encoder has stored what it accepted. Raises ApiError if it fails, or with `still` lost it."""
        for image, param in zip(loaded.files, loaded.params, strict=True):
            with _naming(param):
                await self.encoder.check_stored(image, still=still)

    async def _parts(self, loaded: Loaded, dialect: Dialect, ticket: Ticket) -> list[Part]:
        async def part(number: int) -> Part:
            with _naming(loaded.params[number]):
                part = await dialect.part(loaded.files[number], self.encoder)
            ticket.hold(size_of(part))
            return part

        parts = await _each(part, range(len(loaded.files)))
        return [parts[number] for number in loaded.order]

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


@contextmanager
def _naming(param: str) -> Iterator[None]:
    """Errors of the encoder in the block as those of an image."""
    try:
        yield
    except VitwireError as error:
        raise from_encoder(error, param) from error
    except ValueError as error:
        raise ApiError(502, f"the engine has no input for this model's images: {error}", "unsupported_model") from error


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


def size_of(part: Part) -> int:
    """Bytes of a part, hardly less than it has as JSON."""
    return sum(map(len, _strings(part)))


def _strings(part: object) -> Iterable[Sized]:
    """The strings of a part, encoded or not, and its lists of numbers, which are short."""
    if isinstance(part, dict):
        for value in part.values():
            yield from _strings(value)
    elif isinstance(part, Sized):
        yield part
