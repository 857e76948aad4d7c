"""A process for each engine, as in a deployment, with vLLM's front end and what sends it its share of the requests.

From JPEG files, clients are in a second process for each engine, and a `vitwire router` stands in front of it.
"""

import asyncio
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from bench.engine import vllm_engine
from bench.engine.front import Fronts
from bench.engine.limits import kill
from bench.engine.loads import Load, Size
from bench.engine.photos import Photos, session
from bench.engine.requests import Asked, draw, renewed
from bench.engine.running import running
from bench.engine.sending import Sender
from bench.engine.streams import AnyWay, Stream
from bench.engine.ways import Local, Reference, Text

from vitwire import AsyncClient

_STOP_SECONDS = 20
_DRAWN = 32
"""Requests of each size, which a stream repeats with other first patches."""


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """What an engine's process needs to start."""

    index: int
    device: int | None
    """Index of its GPU; None leaves it to vLLM."""
    model: Path
    target: str
    """Of the encoders; empty without any."""
    arguments: Mapping[str, Any]
    """Of vLLM."""
    sources: Sequence[str]
    """Of `SOURCES`: what requests come from."""
    environment: Sequence[str]
    """Prefix of commands that run what the encoders run."""


@dataclass(frozen=True, slots=True)
class ClientPlace:
    """Clients of an engine's HTTP servers."""

    index: int
    urls: Mapping[str, str]
    """By way."""


class Share(NamedTuple):
    """Part of a stream, for one engine."""

    way: str
    size: Size
    load: Load
    requests: int
    text: int
    tokens: int


class Failed(NamedTuple):
    """In place of an answer."""

    error: str


class SeatFailed(Exception):
    """A process could not do what it was asked, or has ended."""


BESIDE, OVER = "beside", "over"
"""Generate text during what follows; end that, and return its answers."""


class Seat:
    """The process, as its parent sees it. Every message has one answer."""

    def __init__(self, place: EnginePlace | ClientPlace) -> None:
        context = get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other, place))
        self._process.start()
        other.close()
        self._lost = ""

    def send(self, message: Any) -> None:
        """Raises what the answer raises."""
        try:
            self._pipe.send(message)
        except OSError as error:
            self._lost = self._lost or repr(error)

    def answer(self, seconds: float) -> Any:
        """Raises SeatFailed, also if it takes longer than this; then the process is of no further use."""
        if not self._lost and not self._pipe.poll(seconds):
            self._lost = f"no answer after {seconds:.0f} s"
        if self._lost:
            raise SeatFailed(self._lost)
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._lost = f"the process has ended: {error!r}"
            raise SeatFailed(self._lost) from error
        if isinstance(answer, Failed):
            raise SeatFailed(answer.error)
        return answer

    def hang_up(self) -> None:
        """The process ends, unless it is stuck."""
        self._pipe.close()

    def close(self, seconds: float) -> None:
        """End the process and its descendants, by force if it takes longer than this."""
        self.hang_up()
        self._process.join(0 if self._lost else max(0.0, seconds))
        if self._process.is_alive() and self._process.pid:
            kill(self._process.pid)
            self._process.join()


@contextmanager
def seated(places: Iterable[EnginePlace | ClientPlace]) -> Iterator[list[Seat]]:
    """A process for each; all end at the same time."""
    seats = [Seat(place) for place in places]
    try:
        yield seats
    finally:
        end = time.monotonic() + _STOP_SECONDS
        for seat in seats:
            seat.hang_up()
        for seat in seats:
            seat.close(end - time.monotonic())


def ask(seats: Sequence[Seat], messages: Sequence[Any], seconds: float) -> list[Any]:
    """Send each seat its message. Raises SeatFailed once all have answered, so that others can be asked again."""
    for seat, message in zip(seats, messages, strict=True):
        seat.send(message)
    return answers_of(seats, seconds)


def answers_of(seats: Sequence[Seat], seconds: float) -> list[Any]:
    """The answers of all. Raises SeatFailed once all have answered."""
    answers, failures, end = [], [], time.monotonic() + seconds
    for seat in seats:
        try:
            answers.append(seat.answer(max(0.0, end - time.monotonic())))
        except SeatFailed as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return answers


# -- in the process ------------------------------------------------------------------------------------


def serve(pipe: Connection, place: EnginePlace | ClientPlace) -> None:
    """Until the other end of the pipe is closed."""
    asyncio.run(_serve(pipe, place))


async def _serve(pipe: Connection, place: EnginePlace | ClientPlace) -> None:
    async with AsyncExitStack() as stack:
        try:
            if isinstance(place, EnginePlace):
                described, worker = await _engine(place, stack)
            else:
                http = await stack.enter_async_context(session())
                described, worker = (
                    {},
                    _Worker(place.index, {name: Photos(url, http) for name, url in place.urls.items()}),
                )
        except Exception as error:  # noqa: BLE001 - of vLLM's, of any kind; the parent reports it
            pipe.send(Failed(repr(error)))
            return
        pipe.send(described)
        await worker.work(pipe)


async def _engine(place: EnginePlace, stack: AsyncExitStack) -> tuple[dict[str, Any], "_Worker"]:
    began = time.monotonic()
    # Engines that start at the same time would write the same files.
    os.environ.setdefault("VLLM_CACHE_ROOT", f"{place.model}.cache-{place.index}")
    engine = vllm_engine.start(place.arguments, place.device)
    stack.callback(engine.shutdown)
    described: dict[str, Any] = {**vllm_engine.described(), "engine_start_s": round(time.monotonic() - began, 1)}
    if "jpeg" in place.sources:
        modes = ["reference"] if place.target else []
        started = Fronts.of([engine], place.model, place.target, place.environment, modes)
        fronts = await stack.enter_async_context(started)
        described["urls"] = {"local": fronts.urls[0]} | {mode: fronts.routers[mode][0] for mode in modes}
    worker = _Worker(place.index, {"local": Local(engine)}, texts=[Text(engine)])
    if place.target and "patches" in place.sources:
        worker.client = await stack.enter_async_context(AsyncClient(place.target, affinity=True))
        sender = await Sender.start(place.target)
        stack.callback(sender.close)
        worker.ways["reference"] = Reference(engine, sender)
    return described, worker


@dataclass(slots=True)
class _Worker:
    """Carries out what the parent asks for."""

    index: int
    ways: dict[str, AnyWay]
    texts: Sequence[Text] = ()
    client: AsyncClient | None = None
    names: Iterator[str] = field(init=False)
    _drawn: dict[tuple[Size, int, bool], list[Asked]] = field(default_factory=dict)
    _beside: AsyncExitStack = field(default_factory=AsyncExitStack)
    _others: list[Any] = field(default_factory=list)
    _stream: tuple[Stream, Share] | None = None

    def __post_init__(self) -> None:
        self.names = (f"seat{self.index}-{number}" for number in count())

    async def work(self, pipe: Connection) -> None:
        while True:
            try:
                message = await asyncio.to_thread(pipe.recv)
            except (EOFError, OSError):
                return
            try:
                answer = await self._done(message)
            except Exception as error:  # noqa: BLE001 - as above
                answer = Failed(repr(error))
            with suppress(OSError):  # the parent has ended
                pipe.send(answer)

    async def _done(self, message: Any) -> Any:
        """A share is prepared; a number is the time at which the prepared one starts."""
        if isinstance(message, Share):
            drawn = await self._drawn_for(message)
            asked = [renewed(each, next(self.names)) for each in islice(cycle(drawn), message.requests)]
            self._stream = await Stream.prepare([self.ways[message.way]], asked, self.names), message
        elif isinstance(message, float):
            assert self._stream, "prepared before"
            (stream, share), self._stream = self._stream, None
            await asyncio.sleep(max(0.0, message - time.monotonic()))
            return await stream.drive(share.load, share.tokens, seed=self.index)
        elif message == BESIDE:
            asked = await draw(Size(128), 8, 32, None)
            self._others = await self._beside.enter_async_context(running(self.texts, asked, self.names))
        else:
            await self._beside.aclose()
            others, self._others = self._others, []
            return others
        return None

    async def _drawn_for(self, share: Share) -> list[Asked]:
        """Drawn once for each size, with patches if encoders take them; renewed for each request."""
        client = self.client if share.way == "reference" else None
        kind = (share.size, share.text, client is None)
        if kind not in self._drawn:
            self._drawn = {each: drawn for each, drawn in self._drawn.items() if each[0] == share.size}
            self._drawn[kind] = await draw(share.size, _DRAWN, share.text, client, self.index)
        return self._drawn[kind]
