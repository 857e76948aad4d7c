"""An encoder of SGLang that encodes with Vitwire: images in, embeddings to SGLang's receivers over ZMQ."""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
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
from vitwire_gateway.openai.encoding import Encoded, Encoder
from vitwire_gateway.openai.errors import ApiError
from vitwire_gateway.openai.shares import Budget, Caller, Full, Holding, Turns
from vitwire_gateway.sglang.headers import embedding_header, error_header
from vitwire_gateway.sglang.media import Media
from vitwire_gateway.sglang.parts import Part, Refused, Registration
from vitwire_gateway.sglang.pushing import Frame, Pusher
from vitwire_gateway.sglang.receivers import Receivers

logger = logging.getLogger("vitwire.sglang")

_STATUSES: dict[type[VitwireError], HTTPStatus] = {
    InvalidItem: HTTPStatus.BAD_REQUEST,
    Overloaded: HTTPStatus.SERVICE_UNAVAILABLE,
    Unavailable: HTTPStatus.SERVICE_UNAVAILABLE,
    DeadlineExceeded: HTTPStatus.GATEWAY_TIMEOUT,
}
_CROWDED = "too many embeddings wait for their receivers"
_GRACE_SECONDS = 5.0
"""How long embeddings may wait for their receivers before others may take their place."""
_HEALTH_SECONDS = 1.5
"""SGLang waits 2 s for a health check."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests in flight may hold; what exceeds it is refused. One caller gets three quarters of each."""

    requests: int = 256
    """That are encoded at a time, and as many whose embeddings wait for their receivers."""
    embedding_bytes: int = 2 << 30
    """Of embeddings that their receivers have not taken."""
    encoding: int = 32
    """Images that are read and encoded at a time; more wait."""


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
        self._computing = Budget(limits.requests)
        self._delivering = Budget(limits.requests)
        self._bytes = Budget(limits.embedding_bytes)
        self._encoding = Turns(limits.encoding)
        self._output_type = output_type
        self._reports: set[asyncio.Task[None]] = set()

    async def encode(self, part: Part, caller: Caller, body: Holding | None = None) -> None:
        """Encode the part's images and send them to its receivers. Raises Refused; the receivers get that too.

        body: what the request holds of bodies.
        """
        async with self._bytes.holding(caller.name) as held:
            try:
                for receiver in part.receivers:
                    self._pusher.check(receiver)
                async with _taken(self._computing, caller, "too many requests are in flight"):
                    frames = await self._frames(part, caller, held)
            except Refused as error:
                self._report(part, caller, error)
                raise
            except Exception as error:
                logger.exception("request %s, part %d failed", part.req_id, part.part_idx)
                failure = Refused("the encoder failed; its log has the reason", HTTPStatus.INTERNAL_SERVER_ERROR)
                self._report(part, caller, failure)
                raise failure from error
            async with _taken(self._delivering, caller, _CROWDED) as place:
                await self._deliver(part, caller, frames, [place, held, *([body] if body else [])])

    async def _deliver(self, part: Part, caller: Caller, frames: Sequence[Frame], holdings: Sequence[Holding]) -> None:
        """Send the embeddings once their receivers are known. Raises Refused.

        After a grace, others may have what the request holds; then it fails.
        """
        try:
            async with AsyncExitStack() as stack:
                for holding in holdings:
                    await stack.enter_async_context(holding.losable(math.inf, _GRACE_SECONDS))
                receivers = part.receivers or await self._receivers.take(part.req_id, caller.name)
                await self._pusher.push_all(receivers, frames, caller)
        except TimeoutError:
            raise Refused(_CROWDED, HTTPStatus.SERVICE_UNAVAILABLE) from None

    def register(self, registration: Registration, caller: Caller) -> None:
        """Note where a scheduler wants the embeddings of a request. Raises Refused."""
        self._pusher.check(registration.receiver)
        self._receivers.add(registration, caller.name)

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

    async def _frames(self, part: Part, caller: Caller, held: Holding) -> list[Frame]:
        """The message with the embeddings of the part. Raises Refused, naming the first image that has none."""
        limit = self._media.max_images
        if len(part.sources) > limit:
            raise Refused(f"mm_items: {len(part.sources)} images exceed the limit of {limit}")
        work = [self._encoded(source, index, caller, held) for index, source in enumerate(part.sources)]
        results = await asyncio.gather(*work, return_exceptions=True)
        if error := next((each for each in results if isinstance(each, BaseException)), None):
            raise error
        return _message(part, [each for each in results if isinstance(each, Encoded)])

    async def _encoded(self, source: str, index: int, caller: Caller, held: Holding) -> Encoded:
        async with self._encoding.turn(caller):
            try:
                image = await self._media.image(source)
                encoded = await self._encoder.serving(caller).encode(image, output_type=self._output_type)
                held.take(encoded.embedding._host().nbytes)  # noqa: SLF001  # as received
            except Refused as error:
                raise Refused(f"mm_items[{index}]: {error}", error.status) from error
            except ApiError as error:
                raise Refused(f"mm_items[{index}]: {error}", HTTPStatus(error.status)) from error
            except VitwireError as error:
                raise _refusal(error, index) from error
            except Full:
                raise Refused(_CROWDED, HTTPStatus.SERVICE_UNAVAILABLE) from None
            return encoded

    def _report(self, part: Part, caller: Caller, error: Refused) -> None:
        """Send the error to the receivers that are known, in the background; the response has it too."""
        logger.warning("request %s, part %d: %s", part.req_id, part.part_idx, error)
        if receivers := part.receivers or self._receivers.take_registered(part.req_id):
            task = asyncio.create_task(self._reported(part, receivers, caller, error))
            self._reports.add(task)
            task.add_done_callback(self._reports.discard)

    async def _reported(self, part: Part, receivers: Sequence[str], caller: Caller, error: Refused) -> None:
        try:
            await self._pusher.push_all(receivers, [error_header(part, str(error), error.status)], caller)
        except Refused as failure:
            logger.debug("request %s, part %d: the error was not sent: %s", part.req_id, part.part_idx, failure)


@asynccontextmanager
async def _taken(budget: Budget, caller: Caller, refusal: str) -> AsyncGenerator[Holding, None]:
    """A place in a budget of places. Raises Refused."""
    async with budget.holding(caller.name) as place:
        try:
            place.take(1)
        except Full:
            raise Refused(refusal, HTTPStatus.SERVICE_UNAVAILABLE) from None
        yield place


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
