"""Files of images and clips to embeddings: as many at a time as the limit allows, and each caller its share."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import replace
from typing import NamedTuple

from vitwire import (
    Accepted,
    AsyncClient,
    Embedding,
    InvalidItem,
    Item,
    Model,
    NotCached,
    Report,
    Stored,
    Unauthenticated,
    VitwireError,
)
from vitwire.content_ids import content_id
from vitwire.shared.fairness.places import Places
from vitwire.shared.recent import Recent
from vitwire_gateway.api_errors import ApiError
from vitwire_gateway.callers import Caller
from vitwire_gateway.images.batching import Batches
from vitwire_gateway.images.image_files import Header, ImageFile, clip_kind, header_of, media_type_of
from vitwire_gateway.workers import Workers

_MODEL_SECONDS = 2.0
"""Less than a server takes to restart, so that its new weights never get content ids of the old ones."""
_HEADER_SECONDS = 1.0
"""As in servers; a TIFF of two million strips takes 4 s."""
NO_CACHE = "SERVING without --cache-bytes, which --mode reference needs"
"""The state of an encoder that cannot store."""
_NO_TIMES = "the file does not say how many frames a second has"


class Encoded(NamedTuple):
    """The embedding of an image or clip, and the id of its content in the engine's caches."""

    content_id: str
    embedding: Embedding
    model: Model


class Referenced(NamedTuple):
    """The id and the grid by which an engine asks for the embedding of an image or clip."""

    content_id: str
    grid: tuple[int, int, int]
    model: Model
    times: Accepted | Report
    """Has the times of a clip's frames."""


class Encoder:
    """Encodes images and clips with Vitwire.

    max_encoding: files that are read and encoded at a time.
    content_key: the secret by which ids of contents are made; default: a random one.
    """

    def __init__(
        self, client: AsyncClient, workers: Workers, max_pixels: int, max_encoding: int, content_key: bytes = b""
    ) -> None:
        self.workers = workers
        self.model = Recent(lambda: client.model(refresh=True), _MODEL_SECONDS)
        self.client = client
        self.batches = Batches(client)
        self._max_pixels = max_pixels
        self._content_key = content_key or secrets.token_bytes(32)
        self._places = Places(max_encoding)
        self.caller = Caller.of("anybody")
        self.stores: dict[bytes, asyncio.Task[str]] = {}
        """Files that are being stored, by digest."""

    def serving(self, caller: Caller, metadata: Mapping[str, str] | None = None) -> "Encoder":
        """The same encoder for a request, whose calls carry this metadata."""
        found = copy(self)
        found.client = self.client.with_options(metadata=metadata) if metadata else self.client
        found.caller, found.batches, found.stores = caller, Batches(found.client), {}
        return found

    async def probe(self, seconds: float, refusal: str, *, needs_cache: bool = False) -> str:
        """`SERVING`, or why the encoder is not ready. refusal: as for `from_encoder`."""
        try:
            async with asyncio.timeout(seconds):
                status = await self.client.health(timeout=seconds)
                if status != "SERVING":
                    return status
                model = await self.model.get()  # which needs a token; health does not
        except Unauthenticated:
            return refusal
        except VitwireError as error:
            return str(error)
        except TimeoutError:
            return "the encoder did not answer in time"
        if needs_cache and not model.limits.cached_bytes:
            return NO_CACHE
        return status

    async def encode(self, image: ImageFile, *, together: bool = False) -> Encoded:
        """The embedding of a file; `together`: in one call with others of the request that are read now.

        Raises VitwireError, or ApiError if no worker is left, or the server prepares no such files.
        """
        async with self._places.place(self.caller.path):
            with self.batches.together() if together else nullcontext():
                model = await self.model.get()
                answer = self.batches.add(await self._item(image, model))
            embedding = await answer
        if image.modality == "video" and not embedding.report.frame_seconds:
            raise InvalidItem(_NO_TIMES, item=0)
        return Encoded(content_id_of(image, model, self._content_key), embedding, model)

    @asynccontextmanager
    async def storing(self) -> AsyncGenerator[None, None]:
        """A block that ends when all is stored that was begun in it; if it fails, the rest is cancelled."""
        is_whole = False
        try:
            yield
            is_whole = True
        finally:
            for task in () if is_whole else self.stores.values():
                task.cancel()
            await asyncio.gather(*self.stores.values(), return_exceptions=True)

    async def store(self, image: ImageFile) -> Referenced:
        """Let the server cache the embedding of a file: returns as soon as requests for it wait for it.

        The rest happens in the block of `storing`. Raises VitwireError, or ApiError if no worker is left, or the server
        has no cache or prepares no such files.
        """
        accepted: asyncio.Future[Referenced] = asyncio.get_running_loop().create_future()
        task = self.stores[image.digest] = asyncio.create_task(self._store(image, accepted))
        await asyncio.wait((task, accepted), return_when=asyncio.FIRST_COMPLETED)
        if not accepted.done():
            await task
        return accepted.result()

    async def check_stored(self, image: ImageFile, *, still: bool) -> None:
        """Wait until a file that the server accepted is stored. Raises as `store`.

        still: raises also if the server does not have it any more.
        """
        if task := self.stores.get(image.digest):
            content_id = await task
            if still:
                item = Item(content_id=content_id, modality=image.modality)
                await self.client.store([item])

    async def _store(self, image: ImageFile, accepted: "asyncio.Future[Referenced]") -> str:
        async with self._places.place(self.caller.path):
            model = await self.model.get()
            if not model.limits.cached_bytes:
                message = "the encoder keeps no embeddings: --mode reference needs --cache-bytes on every server"
                raise ApiError(502, message, "encoder_without_cache")
            content_id = content_id_of(image, model, self._content_key)
            if image.modality == "image":  # the server says the times of a clip only if it gets the file
                with suppress(NotCached):
                    (stored,) = await self.client.store([Item(content_id=content_id)])
                    accepted.set_result(Referenced(content_id, stored.grid, model, Report()))
                    return content_id
            item = replace(await self._item(image, model), content_id=content_id)
            async with aclosing(self.client.iter_store([item])) as answers:
                async for _, answer in answers:
                    if isinstance(answer, VitwireError):
                        raise answer from None
                    times = _times(image, answer)
                    if times is not None and not accepted.done():
                        accepted.set_result(Referenced(content_id, answer.grid, model, times))
        return content_id

    async def _item(self, image: ImageFile, model: Model) -> Item:
        """The only place where a file becomes an item: as it is, once its header is known."""
        is_clip = image.modality == "video"
        if image.modality not in model.prepared or (is_clip and "mp4" not in model.encodings):
            noun, extra = ("clips", " and the extra `videos`") if is_clip else ("images", "")
            message = (
                f"the encoder prepares no {noun} of {model.model_type}: it needs --decode-processes above 0{extra} on "
                f"every server, and a model whose {noun} servers prepare"
            )
            raise ApiError(502, message, "encoder_without_decoders")
        await self.media_type(image)
        return Item(encoded=image.content, modality=image.modality, options=image.options)

    async def media_type(self, image: ImageFile) -> str:
        """The media type of a file, such as image/png, from its header. Raises as `header`."""
        if image.modality == "video":
            with _invalid():
                return media_type_of(clip_kind(image.content), "video")
        return media_type_of((await self.header(image)).kind, "image")

    async def header(self, image: ImageFile) -> Header:
        """The header of an image file. Raises InvalidItem, or ApiError if no worker is left."""
        with _invalid():
            job = self.caller, header_of, image.content, 0, self._max_pixels
            return Header(*await self.workers.run(*job, seconds=_HEADER_SECONDS))


@contextmanager
def _invalid() -> Generator[None, None, None]:
    """Errors of a file become InvalidItem."""
    try:
        yield
    except ApiError as error:
        if error.status == 400:
            raise InvalidItem(error.message, item=0) from error
        raise


def _times(image: ImageFile, answer: Accepted | Stored) -> Accepted | Report | None:
    """The answer's part with the times of a clip; None if a later answer has them. Raises InvalidItem if none has."""
    found = answer if isinstance(answer, Accepted) else answer.report
    if found.frame_seconds or image.modality == "image":
        return found
    if isinstance(answer, Stored):
        raise InvalidItem(_NO_TIMES, item=0)
    return None


def content_id_of(image: ImageFile, model: Model, key: bytes) -> str:
    """The id of a file's content."""
    return content_id(image.digest, image.modality, model, key, image.options)
