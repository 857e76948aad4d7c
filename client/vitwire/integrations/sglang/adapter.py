"""An encoder of SGLang that encodes with Vitwire: images in, embeddings to SGLang's receivers over ZMQ."""

import asyncio
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus

import numpy as np

from vitwire import (
    AsyncClient,
    DeadlineExceeded,
    DType,
    InvalidItem,
    Overloaded,
    Unavailable,
    VitwireError,
)
from vitwire.integrations.sglang.headers import embedding_header, error_header
from vitwire.integrations.sglang.media import Media
from vitwire.integrations.sglang.parts import Part, Refused, Registration
from vitwire.integrations.sglang.pushing import Frame, Pusher
from vitwire.integrations.sglang.receivers import Receivers
from vitwire.router.encoding import Encoded, Encoder

logger = logging.getLogger("vitwire.sglang")

_STATUSES: dict[type[VitwireError], HTTPStatus] = {
    InvalidItem: HTTPStatus.BAD_REQUEST,
    Overloaded: HTTPStatus.SERVICE_UNAVAILABLE,
    Unavailable: HTTPStatus.SERVICE_UNAVAILABLE,
    DeadlineExceeded: HTTPStatus.GATEWAY_TIMEOUT,
}
_HEALTH_SECONDS = 1.5
"""SGLang waits 2 s for a health check."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests in flight may hold; what exceeds it is refused."""

    requests: int = 256
    embedding_bytes: int = 2 << 30
    """Of embeddings that their receivers have not taken."""
    encoding: int = 32
    """Images that are read, decoded and encoded at a time; more wait."""


class _Held:
    """The bytes of embeddings that one part holds."""

    def __init__(self, adapter: "Adapter") -> None:
        self._adapter = adapter
        self.count = 0

    def hold(self, count: int) -> None:
        """Raises Refused if there is no room."""
        self._adapter.take(count)
        self.count += count


class Adapter:
    """Serves parts of SGLang's requests. One event loop uses it."""

    def __init__(
        self,
        client: AsyncClient,
        encoder: Encoder,
        media: Media,
        receivers: Receivers,
        pusher: Pusher,
        *,
        limits: Limits,
        output_type: DType | None = None,
    ) -> None:
        self._client = client
        self._encoder = encoder
        self._media = media
        self._receivers = receivers
        self._pusher = pusher
        self._free = limits.requests
        self._free_bytes = limits.embedding_bytes
        self._encoding = asyncio.Semaphore(limits.encoding)
        self._output_type = output_type
        self._reports: set[asyncio.Task[None]] = set()

    async def encode(self, part: Part) -> None:
        """Encode the part's images and send them to its receivers. Raises Refused; the receivers get that too."""
        with self._admitted() as held:
            try:
                for receiver in part.receivers:
                    self._pusher.check(receiver)
                frames = await self._frames(part, held)
            except Refused as error:
                self._report(part, error)
                raise
            except Exception as error:
                logger.exception("request %s, part %d failed", part.req_id, part.part_idx)
                failure = Refused("the encoder failed; its log has the reason", HTTPStatus.INTERNAL_SERVER_ERROR)
                self._report(part, failure)
                raise failure from error
            receivers = part.receivers or await self._receivers.take(part.req_id)
            await self._pusher.push_all(receivers, frames)

    def register(self, registration: Registration) -> None:
        """Note where a scheduler wants the embeddings of a request. Raises Refused."""
        self._pusher.check(registration.receiver)
        self._receivers.add(registration)

    async def is_healthy(self) -> bool:
        """Whether Vitwire is ready."""
        try:
            return await self._client.health("", _HEALTH_SECONDS) == "SERVING"
        except VitwireError:
            return False

    async def close(self) -> None:
        """Drop reports of errors that are on their way."""
        for task in self._reports:
            task.cancel()
        await asyncio.gather(*self._reports, return_exceptions=True)

    def take(self, count: int) -> None:
        """Count bytes of embeddings. Raises Refused if there is no room for them."""
        if count > self._free_bytes:
            message = "too many embeddings wait for their receivers"
            raise Refused(message, HTTPStatus.SERVICE_UNAVAILABLE)
        self._free_bytes -= count

    @contextmanager
    def _admitted(self) -> Generator[_Held, None, None]:
        if not self._free:
            raise Refused("too many requests are in flight", HTTPStatus.SERVICE_UNAVAILABLE)
        self._free -= 1
        held = _Held(self)
        try:
            yield held
        finally:
            self._free += 1
            self._free_bytes += held.count

    async def _frames(self, part: Part, held: _Held) -> list[Frame]:
        """The message with the embeddings of the part. Raises Refused, naming the first image that has none."""
        limit = self._media.max_images
        if len(part.sources) > limit:
            raise Refused(f"mm_items: {len(part.sources)} images exceed the limit of {limit}")
        work = [self._encoded(source, index, held) for index, source in enumerate(part.sources)]
        results = await asyncio.gather(*work, return_exceptions=True)
        if error := next((each for each in results if isinstance(each, BaseException)), None):
            raise error
        return _message(part, [each for each in results if isinstance(each, Encoded)])

    async def _encoded(self, source: str, index: int, held: _Held) -> Encoded:
        async with self._encoding:
            try:
                image = await self._media.image(source)
                encoded = await self._encoder.encode(image, output_type=self._output_type)
            except Refused as error:
                raise Refused(f"mm_items[{index}]: {error}", error.status) from error
            except VitwireError as error:
                raise _refusal(error, index) from error
            held.hold(encoded.embedding._host().nbytes)  # noqa: SLF001  # as received
            return encoded

    def _report(self, part: Part, error: Refused) -> None:
        """Send the error to the receivers that are known, in the background; the response has it too."""
        logger.warning("request %s, part %d: %s", part.req_id, part.part_idx, error)
        if receivers := part.receivers or self._receivers.take_registered(part.req_id):
            task = asyncio.create_task(self._reported(part, receivers, error))
            self._reports.add(task)
            task.add_done_callback(self._reports.discard)

    async def _reported(self, part: Part, receivers: Sequence[str], error: Refused) -> None:
        try:
            await self._pusher.push_all(receivers, [error_header(part, str(error), error.status)])
        except Refused as failure:
            logger.debug("request %s, part %d: the error was not sent: %s", part.req_id, part.part_idx, failure)


def _refusal(error: VitwireError, index: int) -> Refused:
    if isinstance(error, InvalidItem) and error.violations:
        reasons = "; ".join(each.description for each in error.violations)
        return Refused(f"mm_items[{index}]: {reasons}")
    for kind, status in _STATUSES.items():
        if isinstance(error, kind):
            return Refused(f"mm_items[{index}]: {error}", status)
    return Refused(f"mm_items[{index}]: the encoder failed: {error}", HTTPStatus.BAD_GATEWAY)


def _message(part: Part, images: Sequence[Encoded]) -> list[Frame]:
    """A header and the rows of all images. Raises Refused for a model whose tokens do not follow from the grid."""
    for index, each in enumerate(images):
        (t, h, w), count = each.embedding.grid, each.embedding.shape[0]
        if count != t * h * w // each.model.merge_size**2:
            raise Refused(
                f"mm_items[{index}]: {each.model.model_id} gives {count} rows for the grid {(t, h, w)}; SGLang "
                "expects one per merged patch",
                HTTPStatus.NOT_IMPLEMENTED,
            )
    rows = [each.embedding._host() for each in images]  # noqa: SLF001  # as received, in types that numpy lacks too
    joined = np.ascontiguousarray(rows[0] if len(rows) == 1 else np.concatenate(rows))
    header = embedding_header(part, [each.embedding.grid for each in images], joined.shape, images[0].embedding.dtype)
    return [header, joined.reshape(-1).view(np.uint8)]
