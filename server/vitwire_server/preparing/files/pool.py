"""The decoders of one server process."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from vitwire.wire import Buffer
from vitwire_server.core.decoding import Fault
from vitwire_server.core.errors import EncodeFailed, EncoderError, InvalidRequest, Violation
from vitwire_server.core.items import Modality
from vitwire_server.preparing.files.child import Child, DecoderGone
from vitwire_server.preparing.files.device import DeviceDecoder
from vitwire_server.preparing.files.messages import Decode, Decoded, FromDecoder, Measure, Measured, Refused, Setup
from vitwire_server.preparing.files.turns import Flow, Turn, Turns, predicted
from vitwire_server.preparing.rules.forms import form_of
from vitwire_server.preparing.rules.recipe import Recipe

_log = logging.getLogger(__name__)
_PATIENCE = 10.0
"""The wall-clock time of a job is limited to its processor time, so many times, and as many seconds more."""
_LEAST_SECONDS, _SECONDS_PER_PIXEL = 1.0, 5e-7
"""Of processor time that a file may take: several times what the slowest format needs."""


class DecodeMonitor(Protocol):
    """Counts decoders and the files that wait for one; implemented by the metrics."""

    def decoders(self, count: int, busy: int) -> None: ...

    def waiting(self, count: int) -> None: ...


class NotDecoded(Exception):
    """A file was not decoded."""

    def __init__(self, fault: Fault, reason: str) -> None:
        super().__init__(reason)
        self.fault = fault

    def of_item(self, field: str) -> EncoderError:
        """The error of the item; `field` names it."""
        if self.fault is Fault.LOST:
            return EncodeFailed(f"{field}: {self}")
        return InvalidRequest([Violation(field, str(self))])


class Prepared(NamedTuple):
    """The pixels of a file or picture, and the seconds that they took."""

    pixels: memoryview
    waited: float
    """For a decoder."""
    decode: float
    prepare: float
    on_device: bool = False
    """Whether both were done by the decoder on the device."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bounds of a pool."""

    processes: int
    """That decode at a time; one more reads headers."""
    input_bytes: int
    """Of the largest file or picture."""
    output_bytes: int
    """Bytes of the largest prepared item."""
    pixels: int
    seconds: float
    """Of processor time for the largest file."""
    memory: int
    """Bytes of each decoder, beside what it has after its start."""
    device: str = ""
    """Where one more process decodes JPEG files; empty for none."""


class DecodePool:
    """Starts decoders as they are needed, and replaces those that die. Used on one event loop."""

    def __init__(
        self, sizes: Sizes, recipes: Mapping[Modality, Recipe], monitor: DecodeMonitor, *, clips: bool
    ) -> None:
        """`clips` is whether files of clips are read."""
        self._sizes = sizes
        self._recipes = recipes
        self._setup = Setup(dict(recipes), sizes.input_bytes, sizes.pixels, sizes.memory, clips)
        self._monitor = monitor
        self._measuring = Turns(1, self._count_waiting)
        self._decoding = Turns(sizes.processes, self._count_waiting)
        self._on_device = Turns(1, self._count_waiting)
        self._device: DeviceDecoder | None = None
        if sizes.device:
            setup = replace(self._setup, device=sizes.device)
            self._device = DeviceDecoder(setup, sizes.output_bytes, self._on_device)
        self._idle: list[Child] = []
        self._all: set[Child] = set()
        self._returning: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self) -> None:
        """Start the decoder on the device, if there is one; the others start when they are needed."""
        if self._device:
            self._device.start()

    def takes_on_device(self, found: Measured) -> bool:
        """Whether a file goes to the decoder on the device, which prepares it too."""
        return self._device is not None and self._device.takes(found)

    async def measure(self, flow: Flow, data: Buffer, modality: Modality) -> Measured:
        """What the prepared item will be, from the header of its file. Raises NotDecoded."""
        async with self._child(self._measuring, flow, len(data)) as child:
            await child.write(data)
            answer = await self._ask(child, Measure(len(data), modality, self._seconds(len(data))))
        assert isinstance(answer, Measured)
        return answer

    def measure_picture(self, shape: tuple[int, ...], modality: Modality) -> Measured:
        """What a picture, or the frames of a clip, will be, from their shape. Raises NotDecoded."""
        try:
            form = form_of(shape, self._recipes[modality])
        except ValueError as error:
            raise NotDecoded(Fault.UNSUPPORTED, str(error)) from error
        return Measured(form.grid, form.pixels, form.crops, prod(shape[:-1]) + form.area, (*shape[:-1], 3))

    async def decode(
        self,
        flow: Flow,
        data: Buffer,
        modality: Modality,
        found: Measured,
        reserve: Callable[[], Awaitable[memoryview]],
        picture: tuple[int, ...] | None = None,
        *,
        raw: bool = False,
    ) -> Prepared:
        """Prepare a file, or a picture of this shape, that was measured. Raises NotDecoded.

        `reserve` gets the memory for the pixels once it is the item's turn. `raw` leaves the picture, in RGB, for the
        engine to prepare.
        """
        start = time.perf_counter()
        target: memoryview | None = None

        async def reserved() -> memoryview:
            nonlocal target
            target = target or await reserve()
            return target

        done: Decoded | None = None
        if self._device and not raw and self._device.takes(found):
            done = await self._device.decode(flow, data, found, modality, reserved)
        if done:
            waited = max(0.0, time.perf_counter() - start - done.decode_seconds - done.prepare_seconds)
            return Prepared(await reserved(), waited, done.decode_seconds, done.prepare_seconds, on_device=True)
        async with self._child(self._decoding, flow, found.cost) as child:
            waited = time.perf_counter() - start
            memory = await reserved()
            await child.write(data)
            seconds = self._seconds(found.cost)
            answer = await self._ask(child, Decode(len(data), modality, seconds, len(memory), picture, raw))
            assert isinstance(answer, Decoded)
            await child.read(memory)
        return Prepared(memory, waited, answer.decode_seconds, answer.prepare_seconds)

    async def close(self) -> None:
        """End all decoders."""
        self._closed = True
        for task in self._returning:
            task.cancel()
        await asyncio.gather(*self._returning, return_exceptions=True)
        if self._device:
            await self._device.close()
        await asyncio.gather(*(child.close() for child in self._all))
        self._all.clear()

    @asynccontextmanager
    async def _child(self, turns: Turns, flow: Flow, cost: int) -> AsyncIterator[Child]:
        """A decoder for one job, in turn. Raises NotDecoded."""
        turn = await turns.acquire(flow, predicted(cost))
        getting = asyncio.create_task(self._next())
        try:
            child = await asyncio.shield(getting)
            turn.begin()
            yield child
        except DecoderGone as error:
            raise NotDecoded(error.fault, str(error)) from error
        finally:
            task = asyncio.create_task(self._take_back(getting, turns, turn))
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)

    async def _take_back(self, getting: asyncio.Task[Child], turns: Turns, turn: Turn) -> None:
        """End a turn. A decoder that still starts or works, as the RPC was cancelled, is waited for, not replaced."""
        try:
            child = await getting
            await child.idle()
        except DecoderGone as error:
            _log.debug("no decoder was started: %s", error)
        else:
            await self._keep(child)
        finally:
            turns.release(turn)

    async def _next(self) -> Child:
        return await self._next_idle() or await self._start()

    async def _next_idle(self) -> Child | None:
        while self._idle:
            child = self._idle.pop()
            if child.is_alive:
                self._count()
                return child
            await self._drop(child)
        return None

    async def _start(self) -> Child:
        child = await Child.start(self._setup, self._sizes.output_bytes)
        if self._closed:
            await child.close()
            raise DecoderGone(Fault.LOST, "the server is stopping")
        self._all.add(child)
        self._count()
        _log.debug("decoder %d started", child.process.pid)
        return child

    async def _keep(self, child: Child) -> None:
        """For the next job, if it is alive."""
        if child.is_alive:
            child.discard()
            self._idle.append(child)
            self._count()
        else:
            await self._drop(child)

    async def _drop(self, child: Child) -> None:
        await child.close()
        self._all.discard(child)
        self._count()
        _log.warning("decoder %d ended (exit %s)", child.process.pid, child.process.returncode)

    async def _ask(self, child: Child, job: Measure | Decode) -> FromDecoder:
        answer = await child.ask(job, _PATIENCE * (1 + job.seconds))
        if isinstance(answer, Refused):
            raise NotDecoded(answer.fault, answer.reason)
        return answer

    def _seconds(self, cost: int) -> float:
        """Processor time for a job."""
        return min(self._sizes.seconds, _LEAST_SECONDS + cost * _SECONDS_PER_PIXEL)

    def _count(self) -> None:
        self._monitor.decoders(len(self._all), len(self._all) - len(self._idle))

    def _count_waiting(self) -> None:
        self._monitor.waiting(self._measuring.waiting + self._decoding.waiting + self._on_device.waiting)
