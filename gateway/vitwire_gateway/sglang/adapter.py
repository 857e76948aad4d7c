"""An encoder of SGLang that encodes with Vitwire: images and clips in, embeddings to SGLang's receivers over ZMQ."""

import asyncio
import logging
import math
from collections.abc import Sequence
from contextlib import AsyncExitStack

import numpy as np

from vitwire import VitwireError
from vitwire.shared.fairness.budgets import Budget, Holding
from vitwire.shared.fairness.places import Places
from vitwire_gateway.api_errors import ApiError, from_encoder
from vitwire_gateway.callers import Caller
from vitwire_gateway.gateway_settings import SglangSettings
from vitwire_gateway.images.encoding import Encoded, Encoder
from vitwire_gateway.sglang.media import Media
from vitwire_gateway.sglang.receiver_messages import Frame, Pusher, embedding_header, error_header, times_of
from vitwire_gateway.sglang.receiver_requests import Part, ReceiverRequest, refused
from vitwire_gateway.sglang.receivers import Receivers

logger = logging.getLogger("vitwire.sglang")

MAX_ENCODING = 32
"""Files that are read and encoded at a time; more wait."""
_EMBEDDING_BYTES = 2 << 30
"""Bytes of embeddings that their receivers have not taken."""
_MOONCAKE = (
    "this encoder sends embeddings over ZMQ only: start SGLang with --encoder-transfer-backend zmq_to_scheduler "
    "or zmq_to_tokenizer"
)
_GRACE_SECONDS = 5.0
"""Embeddings may wait this long for their receivers before others may take their place."""
_HEALTH_SECONDS = 1.5
"""SGLang waits 2 s for a health check."""


def _crowded() -> ApiError:
    return refused("too many embeddings wait for their receivers", 503)


class Adapter:
    """Serves parts of SGLang's requests. One event loop uses it.

    What requests in flight may hold is limited, and what exceeds it is refused; one caller gets three quarters of each.
    """

    def __init__(
        self,
        settings: SglangSettings,
        encoder: Encoder,
        media: Media,
        pusher: Pusher,
        embedding_bytes: int = _EMBEDDING_BYTES,
    ) -> None:
        self._settings = settings
        self._encoder = encoder
        self._media = media
        self._receivers = Receivers(settings.send_seconds)
        self._pusher = pusher
        self._computing = Budget(settings.max_requests, lambda: refused("too many requests are in flight", 503))
        self._delivering = Budget(settings.max_requests, _crowded)
        self._bytes = Budget(embedding_bytes, _crowded)
        self._encoding = Places(MAX_ENCODING)
        self._reports: set[asyncio.Task[None]] = set()

    async def serve(self, posted: ReceiverRequest, caller: Caller, body: Holding | None = None) -> None:
        """Do what a request asks for. Raises ApiError.

        body: what the request holds of bodies.
        """
        if posted.refusal:
            raise posted.refusal
        if isinstance(posted.asked, Part):
            await self.encode(posted.asked, caller, body)
        elif posted.asked:
            self._pusher.check(posted.asked.receiver)
            self._receivers.add(posted.asked, caller.name)
        else:
            raise refused(_MOONCAKE, 501)

    async def encode(self, part: Part, caller: Caller, body: Holding | None = None) -> None:
        """Encode the part's files and send them to its receivers. Raises ApiError; the receivers get that too."""
        async with self._bytes.holding(caller.name) as held:
            try:
                for receiver in part.receivers:
                    self._pusher.check(receiver)
                async with self._computing.holding(caller.name, 1):
                    frames = await self._frames(part, caller, held)
            except ApiError as error:
                self._report(part, caller, error)
                raise
            except Exception as error:
                logger.exception("request %s, part %d failed", part.req_id, part.part_idx)
                failure = refused("the encoder failed; its log has the reason", 500)
                self._report(part, caller, failure)
                raise failure from error
            async with self._delivering.holding(caller.name, 1) as place:
                await self._deliver(part, caller, frames, [place, held, *([body] if body else [])])

    async def _deliver(self, part: Part, caller: Caller, frames: Sequence[Frame], holdings: Sequence[Holding]) -> None:
        """Send the embeddings once their receivers are known. Raises ApiError.

        After a grace, others may have what the request holds; then it fails.
        """
        try:
            async with AsyncExitStack() as stack:
                for holding in holdings:
                    await stack.enter_async_context(holding.losable(math.inf, _GRACE_SECONDS))
                receivers = part.receivers or await self._receivers.take(part.req_id, caller.name)
                await self._pusher.push_all(receivers, frames, caller)
        except TimeoutError:
            raise _crowded() from None

    async def is_healthy(self) -> bool:
        """True if Vitwire is ready."""
        return await self._encoder.probe(_HEALTH_SECONDS, self._settings.refusal) == "SERVING"

    async def close(self) -> None:
        """Drop reports of errors that are on their way."""
        for task in self._reports:
            task.cancel()
        await asyncio.gather(*self._reports, return_exceptions=True)

    async def _frames(self, part: Part, caller: Caller, held: Holding) -> list[Frame]:
        """The message with the embeddings of the part. Raises ApiError, naming the first file that has none."""
        limit = self._settings.max_images
        if len(part.sources) > limit:
            raise refused(f"mm_items: {len(part.sources)} images or clips exceed the limit of {limit}")
        work = [self._encoded(part, index, caller, held) for index in range(len(part.sources))]
        results = await asyncio.gather(*work, return_exceptions=True)
        if error := next((each for each in results if isinstance(each, BaseException)), None):
            raise error
        return _message(part, [each for each in results if isinstance(each, Encoded)])

    async def _encoded(self, part: Part, index: int, caller: Caller, held: Holding) -> Encoded:
        async with self._encoding.place(caller.path):
            try:
                image = await self._media.image(part.sources[index], part.modality)
                encoded = await self._encoder.serving(caller).encode(image)
                held.take(encoded.embedding._host().nbytes)  # noqa: SLF001  # as received
                return encoded
            except (ApiError, VitwireError) as error:
                failure = error if isinstance(error, ApiError) else from_encoder(error, None, self._settings.refusal)
                status = 503 if failure.status == 429 else failure.status
                raise refused(f"mm_items[{index}]: {failure}", status) from error

    def _report(self, part: Part, caller: Caller, error: ApiError) -> None:
        """Send the error to the receivers that are known, in the background; the response has it too."""
        logger.warning("request %s, part %d: %s", part.req_id, part.part_idx, error)
        if receivers := part.receivers or self._receivers.take_registered(part.req_id):
            task = asyncio.create_task(self._reported(part, receivers, caller, error))
            self._reports.add(task)
            task.add_done_callback(self._reports.discard)

    async def _reported(self, part: Part, receivers: Sequence[str], caller: Caller, error: ApiError) -> None:
        try:
            await self._pusher.push_all(receivers, [error_header(part, str(error), error.status)], caller)
        except ApiError as failure:
            logger.debug("request %s, part %d: the error was not sent: %s", part.req_id, part.part_idx, failure)


def _message(part: Part, images: Sequence[Encoded]) -> list[Frame]:
    """A header and all embeddings. Raises ApiError for a model whose tokens do not follow from the grid."""
    for index, (_, embedding, model) in enumerate(images):
        (t, h, w), count = embedding.grid, embedding.shape[0]
        if count != t * h * w // model.merge_size**2:
            raise refused(
                f"mm_items[{index}]: {model.model_id} gives {count} vectors for the grid {(t, h, w)}; SGLang expects "
                "one per merged patch",
                501,
            )
    arrays = [each.embedding._host() for each in images]  # noqa: SLF001  # as received, in types that numpy lacks too
    joined = np.ascontiguousarray(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
    grids, dtype = [each.embedding.grid for each in images], images[0].embedding.dtype
    is_of_clips = part.modality == "video"
    times = times_of(images[0].model, [each.embedding.report for each in images]) if is_of_clips else {}
    header = embedding_header(part, grids, joined.shape, dtype, times)
    return [header, joined.reshape(-1).view(np.uint8)]
