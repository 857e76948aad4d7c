"""The workers' side of the EC connector: fetches embeddings, and puts them into the encoder cache when ordered to."""

import logging
import queue
import time
from collections.abc import Iterable, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from vitwire.embeddings import Embedding
from vitwire.errors import NotCached
from vitwire.integrations.vllm.settings import Settings
from vitwire.integrations.vllm.table import Content, Order, Outcome, Step, unpacked
from vitwire.items import Item

_log = logging.getLogger("vllm.vitwire")
_PAUSE_SECONDS = 0.05
"""Between two requests for content that is not cached yet."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Input of the language model."""

    width: int
    """Columns of an embedding, including deepstack levels."""
    dtype: torch.dtype
    device: torch.device


class Fetcher:
    """Fetches in threads, of which each has its own request. All methods are called by the worker's main thread."""

    def __init__(self, settings: Settings, expected: Expected) -> None:
        on_cuda = expected.device.type == "cuda"
        self._settings = settings
        self._expected = expected
        self._client = settings.client(str(expected.device) if on_cuda else None)
        prepare = partial(torch.cuda.set_device, expected.device) if on_cuda else None
        self._threads = ThreadPoolExecutor(settings.threads, "vitwire-ec", prepare)
        self._held: dict[int, Future[torch.Tensor]] = {}
        self._ended: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()

    def follow(self, step: Step, encoder_cache: MutableMapping[str, torch.Tensor]) -> None:
        """Carry out the orders of a step. Raises RuntimeError if an embedding that must be loaded cannot be had."""
        self.begin(step.fetches)
        for order in step.loads:
            if order.content.identifier not in encoder_cache:
                encoder_cache[order.content.identifier] = self._load(order)
            self._release(order.number)
        for number in step.drops:
            self._release(number)

    def begin(self, fetches: Iterable[Order]) -> None:
        """Begin to fetch."""
        for order in fetches:
            self._held[order.number] = self._threads.submit(self._fetch, order)

    def take_outcomes(self, wait: float = 0.0) -> dict[int, list[Outcome]]:
        """Fetches that ended since the last call. wait: seconds to wait for one if none has ended."""
        outcomes: dict[int, list[Outcome]] = {}
        if wait > 0:
            with suppress(queue.Empty):
                number, outcome = self._ended.get(timeout=wait)
                outcomes[number] = [outcome]
        while not self._ended.empty():
            number, outcome = self._ended.get()
            outcomes.setdefault(number, []).append(outcome)
        return outcomes

    def close(self) -> None:
        self._client.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._held.clear()

    def _load(self, order: Order) -> torch.Tensor:
        """The rows on the device, in memory of torch's. Waits only after a reset of vLLM's encoder cache."""
        held = self._held.get(order.number)
        if held is None:
            held = self._threads.submit(self._rows, order.content)
        if error := held.exception():
            raise RuntimeError(f"{_named(order.content)} was to be loaded, but is gone: {error}") from error
        return held.result().to(self._expected.device, self._expected.dtype, non_blocking=True, copy=True)

    def _release(self, number: int) -> None:
        if held := self._held.pop(number, None):
            held.cancel()

    def _fetch(self, order: Order) -> torch.Tensor:
        """The rows; how it ended is reported in any case, as requests wait for it."""
        start, content, resent = time.monotonic(), order.content, 0
        try:
            try:
                rows = self._rows(content)
            except NotCached:
                if content.file is None:
                    raise
                resent = 1  # once: a server that loses it again has no room for it
                item = Item(
                    encoded=content.file.numpy().data,
                    modality=content.modality,
                    content_id=content.content_id,
                    options=None if content.options is None else unpacked(content.options.tolist()),
                )
                rows = self._encoded(item, content)
        except Exception as error:
            seconds, missing = time.monotonic() - start, isinstance(error, NotCached)
            text = str(error) if missing else f"{type(error).__name__}: {error}"
            self._ended.put((order.number, Outcome(text, missing, seconds, resent=resent)))
            raise
        nbytes, streamed = rows.nbytes, rows.device.type == "cpu"
        seconds = time.monotonic() - start
        outcome = Outcome("", False, seconds, nbytes * streamed, nbytes * (not streamed), resent)
        self._ended.put((order.number, outcome))
        return rows

    def _rows(self, content: Content) -> torch.Tensor:
        """The rows as they were delivered."""
        item = Item(None, content.grid, content.modality, content.content_id)
        end = time.monotonic() + self._settings.wait
        while True:
            try:
                return self._encoded(item, content)
            except NotCached:
                if time.monotonic() >= end or content.file is not None:
                    raise
                time.sleep(_PAUSE_SECONDS)

    def _encoded(self, item: Item, content: Content) -> torch.Tensor:
        (embedding,) = self._client.encode([item], output_type=self._settings.output_type)
        return self._checked(embedding, content)

    def _checked(self, embedding: Embedding, content: Content) -> torch.Tensor:
        """On the host they are in pinned memory, so that loading them does not wait. Raises ValueError."""
        shape, wanted = embedding.shape, (content.rows, self._expected.width)
        if shape != wanted:
            raise ValueError(
                f"the embedding has shape {shape}, vLLM's model takes {wanted}: the server at {self._settings.target} "
                "has another model than vLLM, or the content_id names an image of another size"
            )
        rows = embedding.torch()
        if self._expected.device.type == "cuda" and rows.device.type == "cpu":
            return rows.pin_memory()
        return rows


def _named(content: Content) -> str:
    return f"{content.modality} {content.content_id!r}"
