"""The images and clips of one request, and the engine's content parts that take their place."""

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from anyio.to_thread import run_sync

from vitwire import Model, ProcessorOptions, VitwireError
from vitwire.items import Modality
from vitwire_gateway.api_errors import ApiError, from_encoder, of_clip, released
from vitwire_gateway.callers import Caller
from vitwire_gateway.gateway_settings import RouterSettings
from vitwire_gateway.images.encoding import Encoded, Encoder
from vitwire_gateway.images.fetching import Fetcher, Hold
from vitwire_gateway.images.image_files import ImageFile
from vitwire_gateway.metrics import Metrics
from vitwire_gateway.requests.engine_parts import MakePart, Part
from vitwire_gateway.requests.image_sources import RequestImages

Errors = dict[Any, ApiError]
"""By source of the request, or by digest of the file: what is wrong with single images."""
K = TypeVar("K")
T = TypeVar("T")

_MAX_AT_ONCE = 8
"""Files of one request that are fetched, or encoded alone, at a time."""
_FLOAT32_BYTES = 4


class Loaded(NamedTuple):
    """The files of a request."""

    files: Mapping[bytes, tuple[ImageFile, str]]
    """By digest, with the name of the first place in errors."""
    order: Sequence[bytes]
    """The digest of each image and clip of the request; empty for one that has an error."""
    until: float
    """When all must be encoded, on the loop's clock."""


@dataclass(frozen=True, slots=True)
class Images:
    """Loads images and clips of requests, and has them encoded."""

    settings: RouterSettings
    encoder: Encoder
    fetcher: Fetcher
    metrics: Metrics
    hold: Hold = lambda _: None
    """Takes memory for bytes of the request."""

    def serving(self, caller: Caller, metadata: Mapping[str, str], hold: Hold) -> "Images":
        """The same for a request, with metadata for the encoder's logs and traces."""
        return replace(self, encoder=self.encoder.serving(caller, metadata), hold=hold)

    async def load(self, request: RequestImages, errors: Errors | None = None) -> Loaded:
        """The files of a request. Raises ApiError, but for single images, if `errors` are collected."""
        until = asyncio.get_running_loop().time() + self.settings.encode_seconds
        params: dict[int, str] = {}
        for place in request.places:
            params.setdefault(place.source, place.param)
        try:
            async with asyncio.timeout_at(until):
                images = await _each(lambda key: self._load(request, key, params[key]), params, errors=errors)
        except TimeoutError as error:
            text = f"the images took longer than {self.settings.encode_seconds:g} s"
            raise ApiError(504, text, "images_timeout") from error
        files: dict[bytes, tuple[ImageFile, str]] = {}
        for key, image in images.items():
            files.setdefault(image.digest, (image, params[key]))
        digests = {key: image.digest for key, image in images.items()}
        return Loaded(files, [digests.get(place.source, b"") for place in request.places], until)

    @asynccontextmanager
    async def in_time(self, loaded: Loaded) -> AsyncGenerator[None, None]:
        """A block that waits for the encoder. Raises ApiError if it takes too long."""
        until = min(loaded.until, asyncio.get_running_loop().time() + self.settings.encoder_wait)
        try:
            async with asyncio.timeout_at(until):
                yield
        except TimeoutError as error:
            raise _late() from error

    async def parts(self, loaded: Loaded, make: MakePart) -> list[Part]:
        """The engine's part for each image and clip of the request, in order. Raises ApiError."""

        async def part(digest: bytes) -> Part:
            image, param = loaded.files[digest]
            with _naming(param, self.settings.refusal, image.modality):
                part = await make(self.encoder, image)
            self.hold(size_of(part))
            return part

        parts = await _each(part, loaded.files)
        return [parts[digest] for digest in loaded.order]

    async def encoded(self, loaded: Loaded, errors: Errors | None = None) -> dict[bytes, Encoded]:
        """The embedding of each image by digest, in few calls to the encoder. Raises as `load`."""

        async def one(digest: bytes) -> Encoded:
            image, param = loaded.files[digest]
            with _naming(param, self.settings.refusal):
                encoded = await self.encoder.encode(image, together=True)
            self.hold(math.prod(encoded.embedding.shape) * _FLOAT32_BYTES)
            return encoded

        async with self.in_time(loaded):
            return await _each(one, loaded.files, self.settings.max_encoding, errors)

    async def model(self) -> Model:
        """The encoder's model. Raises ApiError, also if requests before this one wait for it too long."""
        try:
            async with asyncio.timeout(self.settings.encoder_wait):
                with _naming(None, self.settings.refusal):
                    return await self.encoder.model.get()
        except TimeoutError as error:
            raise _late() from error

    async def check_stored(self, loaded: Loaded, *, still: bool) -> None:
        """Wait until the encoder has stored what it accepted. Raises ApiError if it fails, or with `still` lost it."""
        for image, param in loaded.files.values():
            with _naming(param, self.settings.refusal, image.modality):
                await self.encoder.check_stored(image, still=still)

    async def _load(self, request: RequestImages, key: int, param: str) -> ImageFile:
        source = request.sources[key]
        image, is_clip = source.content, source.modality == "video"
        counter = self.metrics.clips if is_clip else self.metrics.images
        try:
            if isinstance(image, ApiError):
                raise image
            if isinstance(image, str):
                image = await self.fetcher.fetch(image, param, self.hold)
            else:
                self.hold(len(image))
        except ApiError as error:
            counter.labels(source.kind, "refused").inc()
            raise of_clip(error) if is_clip else error from None
        counter.labels(source.kind, "loaded").inc()
        options = ProcessorOptions.of(dict(request.options))
        return await run_sync(ImageFile.of, image, source.modality, options)


def _late() -> ApiError:
    return ApiError(504, "the encoder did not answer in time", "encoder_timeout")


@contextmanager
def _naming(param: str | None, refusal: str, modality: Modality = "image") -> Iterator[None]:
    """Errors of the encoder in the block become errors of the image or clip `param`, as by `from_encoder`."""
    is_clip = modality == "video"
    try:
        yield
    except VitwireError as error:
        found = from_encoder(error, param, refusal)
        raise of_clip(found) if is_clip else found from error
    except ValueError as error:
        what = "clips; send frames as images" if is_clip else "images"
        text = f"{param}: the engine has no input for this model's {what}: {error}"
        raise ApiError(502, text, "unsupported_model", param) from error


async def _each(
    work: Callable[[K], Coroutine[None, None, T]],
    keys: Iterable[K],
    most: int = _MAX_AT_ONCE,
    errors: Errors | None = None,
) -> dict[K, T]:
    """The results by key, `most` at a time; the first error that is not collected cancels the rest."""
    slots = asyncio.Semaphore(most)
    results: dict[K, T] = {}

    async def one(key: K) -> None:
        async with slots:
            try:
                results[key] = await work(key)
            except ApiError as error:
                released(error)
                if errors is None or not error.param:
                    raise
                errors[key] = error

    try:
        async with asyncio.TaskGroup() as group:
            for key in keys:
                group.create_task(one(key))
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return {key: results[key] for key in keys if key in results}


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
