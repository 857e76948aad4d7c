"""The scheduler's view of fetched embeddings: which are fetched, held by the workers, or in the encoder cache."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from vitwire.items import Modality
from vitwire.options import ProcessorOptions

if TYPE_CHECKING:
    import torch

FILE = "vitwire_file"
"""Field of an image's data with its file: bytes in a tensor."""
_log = logging.getLogger("vllm.vitwire")
OPTIONS = "vitwire_options"
"""Field with the options that the encoder got, see `packed`."""
COUNTED = ("fetched", "missing", "failed", "resent", "seconds", "streamed_bytes", "nixl_bytes")
"""Items, and sums over the outcomes of all workers."""
_SHARE_OF_LAST = 0.2
"""Weight of the last fetch in the mean of their times."""


@dataclass(frozen=True, slots=True)
class Content:
    """One image or clip of a request, whose embedding comes from the Vitwire server."""

    identifier: str
    """Its key in vLLM's encoder cache."""
    content_id: str
    """Its key in the Vitwire server's cache."""
    modality: Modality
    grid: tuple[int, int, int]
    rows: int
    """Embeddings that the prompt has places for."""
    file: "torch.Tensor | None" = field(default=None, repr=False, compare=False)
    """To be sent again if the server has lost it; bytes."""
    options: "torch.Tensor | None" = field(default=None, repr=False, compare=False)
    """The processor's options to send with the file, `packed`."""


def packed(options: ProcessorOptions | None) -> list[int]:
    """Options as numbers: the areas, 0 if absent, and the frames."""
    own = options or ProcessorOptions()
    return [own.min_pixels or 0, own.max_pixels or 0, *(own.frames or ())]


def unpacked(numbers: Sequence[int]) -> ProcessorOptions | None:
    """What `packed` made."""
    least, most, *frames = numbers
    return ProcessorOptions.of(ProcessorOptions(least or None, most or None, tuple(frames) or None))


class Order(NamedTuple):
    """A content to fetch or to load. Numbers are never reused, so a late report cannot be mistaken for another's."""

    number: int
    content: Content


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a fetch on a worker."""

    error: str = ""
    missing: bool = False
    """Whether the server does not have the content cached."""
    seconds: float = 0.0
    streamed_bytes: int = 0
    nixl_bytes: int = 0
    resent: int = 0
    """Files that were sent again, as the server had lost them."""


class _State(Enum):
    FETCHING = auto()
    HELD = auto()
    """All workers have it, outside their encoder caches."""
    RESIDENT = auto()
    """It is in the encoder caches, or ordered to be loaded there in this step."""


@dataclass(slots=True, eq=False)
class _Record:
    number: int
    content: Content
    begun: float
    waiters: set[str]
    reports: int = 0
    state: _State = _State.FETCHING

    @property
    def is_ahead(self) -> bool:
        """Whether its rows are outside the encoder cache."""
        return self.state is not _State.RESIDENT


@dataclass(slots=True)
class Step:
    """Orders for the workers in one step."""

    fetches: list[Order] = field(default_factory=list)
    loads: list[Order] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)


class Table:
    """Records by identifier. A content is fetched once, for all requests that wait for it.

    held_tokens: rows outside the encoder cache. A request is admitted as a whole, so that no two requests wait for
        room that the other one has; one alone is always admitted.
    workers: number of workers that report each fetch.
    seconds: after which a fetch that was not reported fails its requests.
    """

    def __init__(self, held_tokens: int, workers: int, seconds: float) -> None:
        self._held_tokens = held_tokens
        self._workers = workers
        self._seconds = seconds
        self._records: dict[str, _Record] = {}
        self._by_number: dict[int, _Record] = {}
        self._last_number = 0
        self._step = Step()
        self._failed: set[str] = set()
        self._counts: dict[str, float] = dict.fromkeys(COUNTED, 0)
        self._usual_seconds = 0.0
        """Moving average of a fetch."""

    def ensure(self, request: str, contents: Sequence[Content], now: float, *, urgent: bool) -> bool:
        """Order fetches of missing contents; True if all contents can be loaded.

        urgent: the request holds KV blocks, which others may wait for: admit it without regard to room.
        """
        if request in self._failed:
            return False
        missing = {each.identifier: each for each in contents if each.identifier not in self._records}
        if missing and not self._admits(missing.values(), urgent=urgent):
            return False
        for content in missing.values():
            self._fetch(content, now)
        ready = True
        for record in [self._records[each.identifier] for each in contents]:
            record.waiters.add(request)
            if record.state is _State.FETCHING:
                ready = False
                if now > record.begun + self._seconds:
                    self._fail(record, Outcome(error=f"no worker reported it within {self._seconds:g} s"))
                    return False
        return ready

    def refuse(self, request: str) -> None:
        """The request fails."""
        self._failed.add(request)

    def remaining(self, contents: Iterable[Content], now: float) -> float | None:
        """Estimated seconds until these are fetched; None if none is being fetched.

        Infinite once one is late by as much again: every step would wait for a server that hangs.
        """
        records = [self._records[each.identifier] for each in contents if each.identifier in self._records]
        fetching = [record.begun for record in records if record.state is _State.FETCHING]
        if fetching and now > min(fetching) + 2 * self._usual_seconds:
            return inf
        return max(0.0, max(fetching) + self._usual_seconds - now) if fetching else None

    def take_fetches(self) -> list[Order]:
        """Fetches that a worker of this process begins now, before the step's other orders."""
        fetches, self._step.fetches = self._step.fetches, []
        return fetches

    def has(self, identifier: str) -> bool:
        """Whether the workers can load it."""
        record = self._records.get(identifier)
        return record is not None and record.state is not _State.FETCHING

    def allocated(self, identifier: str) -> None:
        """vLLM made room for it in its encoder cache: load it in this step, unless it is already there."""
        record = self._records.get(identifier)
        if record is not None and record.state is not _State.FETCHING:
            record.state = _State.RESIDENT
            self._step.loads.append(Order(record.number, record.content))

    def finished(self, request: str, identifiers: Iterable[str]) -> None:
        """The request is over."""
        self._failed.discard(request)
        self.release(request, identifiers)

    def release(self, request: str, identifiers: Iterable[str]) -> None:
        """The request does not need these: drop what is fetched for it alone."""
        for identifier in identifiers:
            record = self._records.get(identifier)
            if record is None:
                continue
            record.waiters.discard(request)
            if not record.waiters and record.is_ahead:
                self._drop(record)

    def reported(self, number: int, outcomes: Sequence[Outcome]) -> None:
        """Outcomes of a fetch on some of the workers."""
        record = self._by_number.get(number)
        for outcome in outcomes:
            for name in ("resent", "seconds", "streamed_bytes", "nixl_bytes"):
                self._counts[name] += getattr(outcome, name)
            self._usual_seconds += _SHARE_OF_LAST * (outcome.seconds - self._usual_seconds)
        if record is None or record.state is not _State.FETCHING:
            return
        record.reports += len(outcomes)
        if failure := next((each for each in outcomes if each.error), None):
            self._fail(record, failure)
        elif record.reports >= self._workers:
            record.state = _State.HELD
            self._counts["fetched"] += 1

    def take_failed(self) -> set[str]:
        """Requests whose contents cannot be had."""
        failed, self._failed = self._failed, set()
        return failed

    def take_counts(self) -> dict[str, float]:
        """Counts of events since the last call, by the names in `COUNTED`."""
        counts, self._counts = self._counts, dict.fromkeys(COUNTED, 0)
        return counts

    def take_step(self, freed: Iterable[str]) -> Step:
        """The orders of this step, in which the workers free these entries of their encoder caches before they load."""
        step, self._step = self._step, Step()
        for identifier in freed:
            record = self._records.get(identifier)
            if record is not None and record.state is _State.RESIDENT:
                self._forget(record)
                step.loads = [order for order in step.loads if order.number != record.number]
                step.drops.append(record.number)
        return step

    def _admits(self, contents: Iterable[Content], *, urgent: bool) -> bool:
        ahead = sum(record.content.rows for record in self._records.values() if record.is_ahead)
        return urgent or not ahead or ahead + sum(each.rows for each in contents) <= self._held_tokens

    def _fetch(self, content: Content, now: float) -> None:
        self._last_number += 1
        record = _Record(self._last_number, replace(content, file=None), now, set())
        self._records[content.identifier] = self._by_number[record.number] = record
        self._step.fetches.append(Order(record.number, content))

    def _fail(self, record: _Record, outcome: Outcome) -> None:
        self._counts["missing" if outcome.missing else "failed"] += 1
        content = record.content
        _log.warning(
            "%s %r cannot be fetched, requests fail (%s): %s",
            content.modality,
            content.content_id,
            ", ".join(sorted(record.waiters)),
            outcome.error,
        )
        self._failed |= record.waiters
        self._drop(record)

    def _drop(self, record: _Record) -> None:
        self._forget(record)
        self._step.fetches = [order for order in self._step.fetches if order.number != record.number]
        self._step.drops.append(record.number)

    def _forget(self, record: _Record) -> None:
        del self._records[record.content.identifier], self._by_number[record.number]
