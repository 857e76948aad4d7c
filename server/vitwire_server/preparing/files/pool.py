"""The decoders of one server process."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from math import prod
from typing import NamedTuple

from vitwire.shared.fairness.places import Places
from vitwire.shared.fairness.shares import Path
from vitwire.wire import Buffer
from vitwire_children.lending import Pool
from vitwire_children.serving import Fault, NotDone
from vitwire_server.core.items import Areas, Modality
from vitwire_server.observe.metrics.rpc import RpcMetrics
from vitwire_server.preparing.files.decoders import DEVICE_SECONDS, Decoder, DeviceDecoder
from vitwire_server.preparing.files.messages import Decode, Decoded, Measure, Measured, Setup
from vitwire_server.preparing.rules.forms import form_of

_log = logging.getLogger(__name__)
_PATIENCE, _PATIENCE_ON_DEVICE = 10.0, 3.0
"""A job may take its processor time and one second more, times this, of wall-clock time."""
_START_SECONDS = 30.0
"""Seconds that a server waits for its decoders before it is ready without them."""
_LEAST_SECONDS, _SECONDS_PER_PIXEL = 1.0, 5e-7
"""Processor time that a file may take: several times what the slowest format needs."""
_HEADER_SECONDS = 1.0
"""Processor time for the header of an image, which takes milliseconds, whatever the size of its file."""
_HEADERS = 2
"""Headers that are read at a time: a decoder that hangs over one leaves a place to others."""
_LONG = 1_000_000
"""Microseconds beyond which a job counts as long: one caller's long jobs leave a decoder to others."""
_LEAST_MICROSECONDS, _PIXELS_PER_MICROSECOND = 20_000, 20


class Prepared(NamedTuple):
    """The pixels of a file or picture, and the seconds that they took."""

    pixels: memoryview
    waited: float
    """For a decoder."""
    decode: float
    prepare: float
    on_device: bool = False
    """True if the decoder on the device did both."""


def predicted(cost: int) -> int:
    """Predicted microseconds of a job that decodes `cost` pixels, which a decoder says that may be taken over."""
    return _LEAST_MICROSECONDS + max(0, cost) // _PIXELS_PER_MICROSECOND


def places_of(processes: int, changed: Callable[[], None]) -> Places:
    """Places at this many decoders."""
    return Places(processes, share=max(1, processes - 1), long=_LONG, changed=changed)


class DecodePool:
    """Lends decoders to jobs. Used on one event loop.

    The flow of a job is its priority, its caller, the caller's connection, and the request. They take turns.
    """

    def __init__(self, processes: int, monitor: RpcMetrics, device: str = "", modules: Collection[str] = ()) -> None:
        """Start `processes` decoders, one more for headers, and those of `modules` on `device`.

        They load their libraries now.
        """
        self._monitor = monitor
        self._awaited: asyncio.Future[Setup] = asyncio.get_running_loop().create_future()
        self._decoders = Pool(lambda: Decoder.begin(self._awaited), processes + 1, monitor.decoders)
        self._measuring = places_of(_HEADERS, self._count_waiting)
        self._decoding = places_of(processes, self._count_waiting)
        self._on_device = {module: places_of(1, self._count_waiting) for module in modules}
        self._devices = {module: DeviceDecoder(self._awaited, device, module) for module in modules}
        self._starting: list[asyncio.Task[object]] = [asyncio.create_task(self._decoders.start(processes + 1))]
        self._starting += [asyncio.create_task(each.settled.wait()) for each in self._devices.values()]

    def set_up(self, setup: Setup, modules: Collection[str]) -> None:
        """The model is known; decoders of these modules turned out to decode."""
        for module in self._devices.keys() - set(modules):
            self._starting.append(asyncio.create_task(self._devices.pop(module).close()))
        self._awaited.set_result(setup)

    async def ready(self) -> None:
        """Wait for the decoders, some seconds at most."""
        await asyncio.wait(self._starting, timeout=_START_SECONDS)

    @property
    def waiting(self) -> int:
        """Jobs that wait for a decoder."""
        return sum(each.waiting for each in (self._measuring, self._decoding, *self._on_device.values()))

    @property
    def _setup(self) -> Setup:
        return self._awaited.result()

    def takes_on_device(self, found: Measured) -> bool:
        """True if a file goes to the decoder on the device, which prepares it too."""
        return self._taking(found) is not None

    def _taking(self, found: Measured) -> str | None:
        """The module of the decoder on the device that takes a file."""
        return next((module for module, each in self._devices.items() if each.takes(found)), None)

    async def measure(
        self, flow: Path, data: Buffer, modality: Modality, areas: Areas | None = None, frames: tuple[int, ...] = ()
    ) -> Measured:
        """Form and cost of the prepared item, from its file. Raises NotDone.

        Clips share places with files that are decoded: their frames are counted, and some are decoded for that.
        """
        is_image = modality is Modality.IMAGE
        places = self._measuring if is_image else self._decoding
        seconds, wall = (_HEADER_SECONDS, _PATIENCE * _HEADER_SECONDS) if is_image else self._bounds(len(data))
        async with self._lent(self._decoders, places, flow, predicted(0), is_open=not is_image) as child:
            await child.write(data)
            return await child.do(Measure(len(data), modality, seconds, areas, frames), wall, Measured)

    def measure_picture(self, shape: tuple[int, ...], modality: Modality, areas: Areas | None = None) -> Measured:
        """Form and cost of a prepared picture, or the frames of a clip, from their shape. Raises NotDone."""
        try:
            form = form_of(shape, self._setup.recipes[modality].within(areas))
        except ValueError as error:
            raise NotDone(Fault.UNSUPPORTED, str(error)) from error
        return Measured.of(form, prod(shape[:-1]), shape)

    async def decode(
        self,
        flow: Path,
        data: Buffer,
        modality: Modality,
        found: Measured,
        reserve: Callable[[], Awaitable[memoryview]],
        picture: tuple[int, ...] | None = None,
        *,
        areas: Areas | None = None,
        frames: tuple[int, ...] = (),
        raw: bool = False,
    ) -> Prepared:
        """Prepare a file, or a picture of this shape, that was measured. Raises NotDone.

        `reserve` gets the memory for the pixels once the item has a decoder. `raw` leaves the picture, in RGB, for the
        engine to prepare. `areas` and `frames` are as for `measure`.
        """
        start = time.perf_counter()
        how = picture, raw, found.orientation, areas, frames, found.film
        target: memoryview | None = None

        async def decoded(decoders: Pool[Decoder], at: Places, seconds: float, wall: float) -> Prepared:
            nonlocal target
            async with self._lent(decoders, at, flow, predicted(found.cost)) as child:
                waited = time.perf_counter() - start
                target = target or await reserve()
                await child.write(data)
                job = Decode(len(data), modality, seconds, len(target), *how)
                answer = await child.do(job, wall, Decoded)
                await child.read(target)
            on_device = decoders is not self._decoders
            return Prepared(target, waited, answer.decode_seconds, answer.prepare_seconds, on_device)

        if not raw and (module := self._taking(found)):
            bounds = DEVICE_SECONDS, DEVICE_SECONDS
            if found.film:
                seconds, _ = self._bounds(found.cost + len(data))
                bounds = seconds, _PATIENCE_ON_DEVICE * (1 + seconds)
            try:
                return await decoded(self._devices[module], self._on_device[module], *bounds)
            except NotDone as error:
                _log.debug("a file is left to other decoders: %s", error)
        return await decoded(self._decoders, self._decoding, *self._bounds(found.cost))

    async def close(self) -> None:
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for each in self._devices.values():
            await each.close()
        await self._decoders.close()

    @asynccontextmanager
    async def _lent(
        self, decoders: Pool[Decoder], places: Places, flow: Path, cost: int, *, is_open: bool = False
    ) -> AsyncIterator[Decoder]:
        """A decoder for one job, as `Places.acquire`. Raises NotDone."""
        place = await places.acquire(flow, cost, is_open=is_open)
        async with decoders.lent(lambda: places.give_back(place)) as child:
            place.begin()
            yield child

    def _bounds(self, cost: int) -> tuple[float, float]:
        """Processor time and wall-clock time for a job that costs this many pixels or bytes."""
        seconds = min(self._setup.sizes.seconds, _LEAST_SECONDS + max(0, cost) * _SECONDS_PER_PIXEL)
        return seconds, _PATIENCE * (1 + seconds)

    def _count_waiting(self) -> None:
        self._monitor.waiting(self.waiting)
