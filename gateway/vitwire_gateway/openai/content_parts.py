"""The images and clips of one request, and the engine's content parts that take their place."""

import asyncio
import math
from base64 import b64encode
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

from anyio.to_thread import run_sync

from vitwire import Model, VitwireError
from vitwire.items import Modality
from vitwire_gateway.api_errors import ApiError, from_encoder, of_clip
from vitwire_gateway.fairness import Caller
from vitwire_gateway.gateway_settings import Mode, RouterSettings
from vitwire_gateway.images.encoding import Encoded, Encoder
from vitwire_gateway.images.fetching import Fetcher, Hold
from vitwire_gateway.images.image_files import ImageFile
from vitwire_gateway.metrics import Metrics
from vitwire_gateway.openai.chat import Hole
from vitwire_gateway.openai.chat_reading import Source, WithImages

K = TypeVar("K")
T = TypeVar("T")
Part = dict[str, Any]
Api = Literal["chat", "responses", "messages"]
"""APIs whose requests may have images."""

_MAX_AT_ONCE = 8
"""Files of one request that are fetched, or encoded alone, at a time."""
_FLOAT32_BYTES = 4


async def _file(encoder: Encoder, image: ImageFile) -> Part:
    """The file itself, checked."""
    kind = await encoder.media_type(image)
    return {"url": await run_sync(lambda: f"data:{kind};base64,{b64encode(image.content).decode()}")}


async def _whole(encoder: Encoder, image: ImageFile) -> Part:
    field = "image_url" if image.modality == "image" else "video_url"
    return {"type": field, field: await _file(encoder, image)}


async def _input_image(encoder: Encoder, image: ImageFile) -> Part:
    return {"image_url": (await _file(encoder, image))["url"]}


async def _source(encoder: Encoder, image: ImageFile) -> Part:
    kind = await encoder.media_type(image)
    content = await run_sync(lambda: b64encode(image.content).decode())
    return {"type": "base64", "media_type": kind, "data": content}


MakePart = Callable[[Encoder, ImageFile], Awaitable[Part]]
"""Raises VitwireError, or ValueError for a model that the engine has no such input for."""


class Dialect(NamedTuple):
    """The form in which an engine takes images and clips: `part` makes what `filled` puts into the hole."""

    hole: Hole
    part: MakePart
    unchanged: MakePart = _whole
    """The file itself, for the engine to encode."""


def mode_of(settings: RouterSettings) -> Mode:
    """`--mode`, or the engine's default."""
    return settings.mode or ("reference" if settings.engine == "sglang" else "inline")


def dialect_of(settings: RouterSettings, api: Api = "chat") -> Dialect:
    """The dialect of `--engine` and `--mode`. Raises ValueError for a mode that the engine does not have.

    vLLM gets requests for messages as chat requests.
    """
    mode = mode_of(settings)
    if settings.engine == "sglang":  # which requests embeddings by SGLang's protocol
        if mode == "inline":
            raise ValueError("--mode inline: SGLang's chat API takes no embeddings; use --mode reference with SGLang")
        if settings.on_encoder_failure == "engine":
            raise ValueError("--on-encoder-failure engine: SGLang requests embeddings itself; leave it out with SGLang")
        taken: dict[Api, Dialect] = {
            "chat": Dialect("image", _file),
            "responses": Dialect("input_image", _input_image),
            "messages": Dialect("source", _source),
        }
        return taken[api]
    from vitwire.integrations.vllm import parts  # noqa: PLC0415  # only for this engine

    async def inline(encoder: Encoder, image: ImageFile) -> Part:
        if image.modality == "video":
            parts.check_clips(await encoder.model.get())
        content_id, embedding, model = await encoder.encode(image)
        part_of = parts.unencoded_image_part if image.modality == "image" else parts.unencoded_video_part
        return await run_sync(lambda: part_of(embedding, model, uuid=content_id))

    async def reference(encoder: Encoder, image: ImageFile) -> Part:
        if image.modality == "video":
            parts.check_clips(await encoder.model.get())
        content_id, grid, model, seconds = await encoder.store(image)
        times = model.group_seconds(seconds)
        return parts.reference_part(grid, model, content_id, modality=image.modality, timestamps=times)

    part = inline if mode == "inline" else reference
    if api != "responses":
        return Dialect("part", part)

    async def input_image(encoder: Encoder, image: ImageFile) -> Part:
        """vLLM keeps these fields, and reads an image without `image_url` but with `uuid` by them."""
        return {name: value for name, value in (await part(encoder, image)).items() if name != "type"}

    return Dialect("input_image", input_image, _input_image)


class Loaded(NamedTuple):
    """The files of a request."""

    files: Mapping[bytes, tuple[ImageFile, str]]
    """By digest, with the name of the first place in errors."""
    order: Sequence[bytes]
    """The digest of each image and clip of the request."""
    until: float
    """When all must be encoded, on the loop's clock."""


@dataclass(frozen=True, slots=True)
class Images:
    """Turns images and clips of requests into content parts."""

    settings: RouterSettings
    encoder: Encoder
    fetcher: Fetcher
    dialect: Dialect
    metrics: Metrics
    hold: Hold = lambda _: None
    """Takes memory for bytes of the request."""

    def serving(
        self, caller: Caller, metadata: Mapping[str, str], hold: Hold, dialect: Dialect | None = None
    ) -> "Images":
        """The same for a request, perhaps in another dialect, with metadata for the encoder's logs and traces."""
        encoder = self.encoder.serving(caller, metadata)
        return replace(self, encoder=encoder, hold=hold, dialect=dialect or self.dialect)

    async def load(self, request: WithImages) -> Loaded:
        """The files of a request. Raises ApiError."""
        until = asyncio.get_running_loop().time() + self.settings.encode_seconds
        params: dict[int, str] = {}
        for place in request.places:
            params.setdefault(place.source, place.param)
        try:
            async with asyncio.timeout_at(until):
                images = await _each(lambda key: self._load(request.sources[key], params[key]), params)
        except TimeoutError as error:
            text = f"the images took longer than {self.settings.encode_seconds:g} s"
            raise ApiError(504, text, "images_timeout") from error
        files: dict[bytes, tuple[ImageFile, str]] = {}
        for key, image in images.items():
            files.setdefault(image.digest, (image, params[key]))
        return Loaded(files, [images[place.source].digest for place in request.places], until)

    async def parts(self, loaded: Loaded) -> list[Part]:
        """The engine's part for each image and clip of the request, in order. Raises ApiError."""
        until = min(loaded.until, asyncio.get_running_loop().time() + self.settings.encoder_wait)
        try:
            async with asyncio.timeout_at(until):
                return await self._parts(loaded, self.dialect.part)
        except TimeoutError as error:
            raise _late() from error

    async def encoded(self, loaded: Loaded) -> dict[bytes, Encoded]:
        """The embedding of each image by digest, in few calls to the encoder. Raises ApiError."""
        until = min(loaded.until, asyncio.get_running_loop().time() + self.settings.encoder_wait)

        async def one(digest: bytes) -> Encoded:
            image, param = loaded.files[digest]
            with _naming(param):
                encoded = await self.encoder.encode_in(batches, image)
            self.hold(math.prod(encoded.embedding.shape) * _FLOAT32_BYTES)
            return encoded

        try:
            async with asyncio.timeout_at(until), self.encoder.batches() as batches:
                return await _each(one, loaded.files, self.settings.max_encoding)
        except TimeoutError as error:
            raise _late() from error

    async def model(self) -> Model:
        """The encoder's model. Raises ApiError, also if requests before this one wait for it too long."""
        try:
            async with asyncio.timeout(self.settings.encoder_wait):
                with _naming(None):
                    return await self.encoder.model.get()
        except TimeoutError as error:
            raise _late() from error

    async def unchanged(self, loaded: Loaded) -> list[Part]:
        """The same with the files themselves, for the engine to encode. Raises ApiError."""
        return await self._parts(loaded, self.dialect.unchanged)

    async def check_stored(self, loaded: Loaded, *, still: bool) -> None:
        """Wait until the encoder has stored what it accepted. Raises ApiError if it fails, or with `still` lost it."""
        for image, param in loaded.files.values():
            with _naming(param, image.modality):
                await self.encoder.check_stored(image, still=still)

    async def _parts(self, loaded: Loaded, make: MakePart) -> list[Part]:
        async def part(digest: bytes) -> Part:
            image, param = loaded.files[digest]
            with _naming(param, image.modality):
                part = await make(self.encoder, image)
            self.hold(size_of(part))
            return part

        parts = await _each(part, loaded.files)
        return [parts[digest] for digest in loaded.order]

    async def _load(self, source: Source, param: str) -> ImageFile:
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
        return await run_sync(ImageFile.of, image, source.modality)


def _late() -> ApiError:
    return ApiError(504, "the encoder did not answer in time", "encoder_timeout")


@contextmanager
def _naming(param: str | None, modality: Modality = "image") -> Iterator[None]:
    """Errors of the encoder in the block become errors of the image or clip `param`."""
    is_clip = modality == "video"
    try:
        yield
    except VitwireError as error:
        found = from_encoder(error, param)
        raise of_clip(found) if is_clip else found from error
    except ValueError as error:
        what = "clips; send frames as images" if is_clip else "images"
        text = f"{param}: the engine has no input for this model's {what}: {error}"
        raise ApiError(502, text, "unsupported_model", param) from error


async def _each(
    work: Callable[[K], Coroutine[None, None, T]], keys: Iterable[K], most: int = _MAX_AT_ONCE
) -> dict[K, T]:
    """The results by key, `most` at a time; the first error cancels the rest."""
    slots = asyncio.Semaphore(most)

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
