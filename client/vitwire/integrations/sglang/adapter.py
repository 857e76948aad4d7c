"""An encoder of SGLang that encodes with Vitwire: images in, embeddings to SGLang's receivers over ZMQ."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus

import numpy as np

from vitwire import (
    AsyncClient,
    DeadlineExceeded,
    DType,
    Embedding,
    InvalidItem,
    Model,
    Overloaded,
    Unavailable,
    VitwireError,
)
from vitwire.integrations.sglang.headers import embedding_header, error_header
from vitwire.integrations.sglang.media import Media
from vitwire.integrations.sglang.parts import Part, Refused, Registration
from vitwire.integrations.sglang.pushing import Frame, Pusher
from vitwire.integrations.sglang.receivers import Receivers

logger = logging.getLogger("vitwire.sglang")

_STATUSES: dict[type[VitwireError], HTTPStatus] = {
    InvalidItem: HTTPStatus.BAD_REQUEST,
    Overloaded: HTTPStatus.SERVICE_UNAVAILABLE,
    Unavailable: HTTPStatus.SERVICE_UNAVAILABLE,
    DeadlineExceeded: HTTPStatus.GATEWAY_TIMEOUT,
}
_HEALTH_SECONDS = 1.5
"""SGLang waits 2 s for a health check."""


class Adapter:
    """Serves parts of SGLang's requests. One event loop uses it.

    max_requests: parts in flight, more are refused; max_encoding: parts whose images are in memory.
    """

    def __init__(
        self,
        client: AsyncClient,
        media: Media,
        receivers: Receivers,
        pusher: Pusher,
        *,
        max_requests: int = 256,
        max_encoding: int = 32,
        output_type: DType | None = None,
    ) -> None:
        self._client = client
        self._media = media
        self._receivers = receivers
        self._pusher = pusher
        self._free = max_requests
        self._encoding = asyncio.Semaphore(max_encoding)
        self._output_type = output_type
        self._reports: set[asyncio.Task[None]] = set()

    async def encode(self, part: Part) -> None:
        """Encode the part's images and send them to its receivers. Raises Refused; the receivers get that too."""
        async with self._admitted():
            try:
                for receiver in part.receivers:
                    self._pusher.check(receiver)
                frames = await self._frames(part)
            except Refused as error:
                self._report(part, error)
                raise
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

    @asynccontextmanager
    async def _admitted(self) -> AsyncGenerator[None, None]:
        if not self._free:
            raise Refused("too many requests are in flight", HTTPStatus.SERVICE_UNAVAILABLE)
        self._free -= 1
        try:
            yield
        finally:
            self._free += 1

    async def _frames(self, part: Part) -> list[Frame]:
        """The message with the embeddings of the part. Raises Refused."""
        async with self._encoding:
            try:
                model = await self._client.model()
                items = await self._media.items(part.sources, model)
                embeddings = await self._client.encode(items, output_type=self._output_type)
            except VitwireError as error:
                raise _refusal(error) from error
            return _message(part, embeddings, model)

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


def _refusal(error: VitwireError) -> Refused:
    place = "" if error.item is None else f"mm_items[{error.item}]: "
    for kind, status in _STATUSES.items():
        if isinstance(error, kind):
            return Refused(f"{place}{error}", status)
    return Refused(f"{place}the encoder failed: {error}", HTTPStatus.BAD_GATEWAY)


def _message(part: Part, embeddings: Sequence[Embedding], model: Model) -> list[Frame]:
    """A header and the rows of all images. Raises Refused for a model whose tokens do not follow from the grid."""
    for index, each in enumerate(embeddings):
        t, h, w = each.grid
        if each.shape[0] != t * h * w // model.merge_size**2:
            raise Refused(
                f"mm_items[{index}]: {model.model_id} gives {each.shape[0]} rows for the grid {each.grid}; SGLang "
                "expects one per merged patch",
                HTTPStatus.NOT_IMPLEMENTED,
            )
    rows = [each._host() for each in embeddings]  # noqa: SLF001  # as received, in types that numpy lacks too
    joined = np.ascontiguousarray(rows[0] if len(rows) == 1 else np.concatenate(rows))
    grids = [each.grid for each in embeddings]
    header = embedding_header(part, grids, joined.shape, embeddings[0].dtype)
    return [header, joined.reshape(-1).view(np.uint8)]
