"""Uploads of a front end's images and clips to the Vitwire server, by an event loop in a separate thread."""

import asyncio
import hashlib
import logging
import threading
import time
from concurrent.futures import Future
from contextlib import aclosing
from typing import TypeVar

import torch

from vitwire._delivery.answers import Accepted, Stored
from vitwire.content_ids import content_id
from vitwire.errors import DeadlineExceeded, NotCached, Overloaded, Unavailable, VitwireError
from vitwire.integrations.vllm.choice import Choice
from vitwire.integrations.vllm.files import ACCEPTING, CLIPS, IMAGES, Reference
from vitwire.integrations.vllm.settings import Settings
from vitwire.integrations.vllm.sizes import Sized
from vitwire.integrations.vllm.table import FILE, OPTIONS, packed
from vitwire.items import Item, Modality
from vitwire.model import Model
from vitwire.options import ProcessorOptions
from vitwire.shared.recent import Recent

T = TypeVar("T")
_log = logging.getLogger("vllm.vitwire")
_MODEL_SECONDS = 2.0
"""Less than one server takes to restart, so that its new weights never get content ids of the old ones."""
_PAUSE_SECONDS = 1.0
"""No upload is tried for so long after the server could not be reached."""
_MOST_SLOW = 4
"""Images in a row that were not accepted in time, after which uploads pause too."""
_PATIENCE: dict[Modality, int] = {"image": 1, "video": 5}
"""A clip is larger, and the server counts its frames before it accepts it."""
_LARGE_BYTES = 1 << 20
"""Files above this are hashed in a thread, so that other uploads do not wait."""
_RESENT_BYTES = 16 << 20
"""Largest file that travels to the engine's workers, which send it again if the encoder loses it."""
_KNOWN = 4096
"""Content ids and digests that are remembered."""


class Declined(Exception):
    """The encoder does not take the image; the message is the reason, a value of the metric's `outcome`."""

    PASSING = ("unavailable", "slow")
    """Reasons that end by themselves."""


class Uploads:
    """Has the server accept images; each is then fetched by the engine's workers, under its content id.

    width: columns of an embedding, deepstack levels included, as the language model takes it.
    choice: for an engine whose tower may be faster.
    """

    def __init__(self, settings: Settings, width: int, choice: Choice | None) -> None:
        self._settings = settings
        self._width = width
        self._choice = choice
        self._key = settings.content_key()
        self._known: dict[str, None] = {}
        """Content ids that were accepted lately, oldest first."""
        self._storing: dict[str, Accepted] = {}
        """What was accepted and is being encoded, by content id."""
        self._refused: dict[bytes, None] = {}
        """Digests of files that the server refused after it had accepted them, oldest first."""
        self._pause_until, self._paused_for, self._slow = 0.0, "", 0
        self._warned: dict[str, float] = {}
        self._loop = asyncio.new_event_loop()
        self._running: set[asyncio.Task[Reference]] = set()
        threading.Thread(target=self._loop.run_forever, name="vitwire-uploads", daemon=True).start()
        self._client = settings.uploading_client()
        self._model = Recent(lambda: self._client.model(refresh=True), _MODEL_SECONDS)

    def begin(self, content: bytes, modality: Modality, sized: Sized | None) -> Future[Reference | None]:
        """Begin to upload a file; `sized` is None for options that the encoder lacks. The future raises Declined."""
        return asyncio.run_coroutine_threadsafe(self._counted(content, modality, sized), self._loop)

    def _pause(self, reason: str) -> None:
        self._pause_until, self._paused_for = time.monotonic() + _PAUSE_SECONDS, reason

    def _warn(self, reason: str, text: str, *arguments: object) -> None:
        """At most once a second for each reason: strangers choose how many images there are."""
        if (now := time.monotonic()) >= self._warned.get(reason, 0.0):
            self._warned[reason] = now + _PAUSE_SECONDS
            _log.warning(text, *arguments)

    async def _counted(self, content: bytes, modality: Modality, sized: Sized | None) -> Reference | None:
        began, outcomes = time.monotonic(), CLIPS if modality == "video" else IMAGES
        try:
            found = await self._bounded(content, modality, sized)
        except Declined as reason:
            outcomes.labels(str(reason)).inc()
            raise
        self._slow = 0
        outcomes.labels("accepted").inc()
        ACCEPTING.observe(time.monotonic() - began)
        return found

    async def _bounded(self, content: bytes, modality: Modality, sized: Sized | None) -> Reference:
        """Raises Declined, at the latest after `accept_seconds`, for clips five times that.

        Cancelling it before acceptance ends the upload.
        """
        if sized is None:
            raise Declined("options")
        if time.monotonic() < self._pause_until:
            raise Declined(self._paused_for)
        accepted: asyncio.Future[Reference] = self._loop.create_future()
        task = self._loop.create_task(self._upload(content, modality, sized, accepted))
        self._running.add(task)
        task.add_done_callback(self._ended)
        try:
            async with asyncio.timeout(self._settings.accept_seconds * _PATIENCE[modality]):
                await asyncio.wait((task, accepted), return_when=asyncio.FIRST_COMPLETED)
            return accepted.result() if accepted.done() else await task
        except TimeoutError:
            self._slow += 1
            if self._slow >= _MOST_SLOW:
                self._pause("slow")
            raise Declined("slow") from None
        finally:
            if not accepted.done():
                task.cancel()

    def _ended(self, task: "asyncio.Task[Reference]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # read, or asyncio logs that it never was

    async def _upload(
        self, content: bytes, modality: Modality, sized: Sized, accepted: "asyncio.Future[Reference]"
    ) -> Reference:
        """Runs until the rows are stored; `accepted` is set before. Raises Declined."""
        digest = b""
        try:
            model = await self._model.get()
            self._check(model, modality, sized.options)
            if len(content) > model.limits.encoded_bytes:
                raise Declined("refused")
            digest, file = await asyncio.to_thread(_read, content) if len(content) > _LARGE_BYTES else _read(content)
            if digest in self._refused:
                raise Declined("refused")
            name = content_id(digest, modality, model, self._key, sized.options)
            found = Reference(name, {**sized.fields, FILE: file, OPTIONS: torch.tensor(packed(sized.options))})
            if name in self._storing:  # asked for, the server would answer when it is encoded
                self._match(self._storing[name], sized)
                return found
            if name in self._known and await self._is_cached(name, modality, sized):
                return found
            if self._choice and self._choice.is_engine_earlier(modality, sized.tokens):
                raise Declined("slower")
            await self._store(
                Item(encoded=content, modality=modality, content_id=name, options=sized.options), sized, found, accepted
            )
        except VitwireError as error:
            raise self._declined(error, digest, was_accepted=accepted.done()) from error
        return found

    async def _store(self, item: Item, sized: Sized, found: Reference, accepted: "asyncio.Future[Reference]") -> None:
        """Raises Declined and VitwireError."""
        began, forecast = time.monotonic(), None
        try:
            async with aclosing(self._client.iter_store([item])) as answers:
                async for _, answer in answers:
                    if isinstance(answer, VitwireError):
                        raise answer from None
                    self._match(answer, sized)
                    _remember(self._known, found.content_id)
                    if not accepted.done():
                        accepted.set_result(found)
                    if isinstance(answer, Accepted):
                        self._storing[found.content_id], forecast = answer, answer.forecast
                        if self._choice:
                            self._choice.accepted(forecast)
        finally:
            self._storing.pop(found.content_id, None)
        if self._choice and forecast is not None:
            self._choice.stored(item.modality, time.monotonic() - began, forecast)

    def _check(self, model: Model, modality: Modality, options: ProcessorOptions | None) -> None:
        """Raises Declined for a server that cannot encode for this engine."""
        if modality == "video" and modality not in model.prepared and "image" in model.prepared:
            raise Declined("format")  # it was started without PyAV
        if options and options.given().keys() - set(model.options):
            raise Declined("options")
        if not model.limits.cached_bytes or "image" not in model.prepared or model.embedding_width != self._width:
            text = "%s cannot encode for this engine: its width is %d, expected %d, with --cache-bytes and decoders"
            _log.error(text, self._settings.target, model.embedding_width, self._width)
            self._pause("model")
            raise Declined("model")

    async def _is_cached(self, name: str, modality: Modality, sized: Sized) -> bool:
        """Raises Declined if this request's options lead to another grid than the cached one."""
        try:
            (stored,) = await self._client.store([Item(content_id=name, modality=modality)])
        except NotCached:
            return False
        self._match(stored, sized)
        return True

    def _match(self, answer: Accepted | Stored, sized: Sized) -> None:
        """Raises Declined unless the embedding fits the places in the prompt."""
        rows = answer.tokens if isinstance(answer, Accepted) else answer.shape[0]
        ours = next((value for name, value in sized.fields.items() if name.endswith("_grid_thw")), None)
        grid = tuple(ours.tolist()) if isinstance(ours, torch.Tensor) else answer.grid
        if (rows, answer.grid) != (sized.tokens, grid):
            text = "an image or clip was not encoded (grid): the server's grid of it is %s (%d tokens), vLLM's %s (%d)"
            self._warn("grid", text, answer.grid, rows, grid, sized.tokens)
            raise Declined("grid")

    def _declined(self, error: VitwireError, digest: bytes, *, was_accepted: bool) -> Declined:
        is_passing = error.item is None or isinstance(error, Overloaded | DeadlineExceeded | Unavailable)
        reason = "unavailable" if is_passing else "refused"
        if error.item is None:
            self._pause("unavailable")
        elif was_accepted and not is_passing:  # its request fails; the next one with this file gets vLLM's own answer
            _remember(self._refused, digest)
        text = "an image or clip was not encoded%s (%s): %s"
        self._warn(f"{reason} {was_accepted}", text, ", though accepted" * was_accepted, reason, error)
        return Declined(reason)


def _read(content: bytes) -> tuple[bytes, torch.Tensor]:
    """Digest and copy of a file; no bytes of a large one."""
    is_resent = len(content) <= _RESENT_BYTES
    file = torch.frombuffer(bytearray(content), dtype=torch.uint8) if is_resent else torch.empty(0, dtype=torch.uint8)
    return hashlib.sha256(content).digest(), file


def _remember(recent: dict[T, None], name: T) -> None:
    recent[name] = None
    if len(recent) > _KNOWN:
        del recent[next(iter(recent))]
