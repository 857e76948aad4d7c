"""Files and pictures of an RPC: prepared, and then submitted like other items."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vitwire_server.core.decoding import Fault
from vitwire_server.core.errors import EncodeFailed, EncoderError
from vitwire_server.core.items import Item
from vitwire_server.core.models import NotOnDevice, Place, Preparation
from vitwire_server.observe.metrics.rpc import RpcMetrics
from vitwire_server.observe.tracing import Attributes, trace_preparing
from vitwire_server.preparing.files.messages import Measured, NotDecoded
from vitwire_server.preparing.files.pool import DecodePool
from vitwire_server.preparing.files.pool import Prepared as Done
from vitwire_server.preparing.files.turns import Flow
from vitwire_server.rpc.unprepared import is_elongated
from vitwire_server.scheduling.admission import Admission, Permit

if TYPE_CHECKING:
    from vitwire_server.rpc.calls import Call
    from vitwire_server.rpc.codec import Codec
    from vitwire_server.rpc.unprepared import Unprepared

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the server chose for a file or picture, for its report."""

    grid: tuple[int, int, int]
    frame_seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Decoding:
    """What all RPCs of a process prepare with."""

    pool: DecodePool
    waiting: Admission
    """Bounds the files in the process."""
    preparation: Preparation
    metrics: RpcMetrics


@dataclass(slots=True)
class Decodes:
    """The files and pictures of one RPC."""

    decoding: Decoding
    codec: "Codec"
    call: "Call"
    region_seconds: float = 0.0
    """For which the region of an item is awaited if it follows."""
    prepared: dict[int, Prepared] = field(default_factory=dict)
    """Of items that were prepared and are not answered yet."""
    _unfinished: set[Permit] = field(default_factory=set)
    """Of files whose bytes are still to come."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def admit(self, nbytes: Sequence[int]) -> list[Permit]:
        """A permit for each file, all or none. Raises Overloaded."""
        return self.decoding.waiting.admit(nbytes, self.call.caller.name)

    def promise(self, nbytes: int) -> Permit:
        """A permit for a file whose bytes are still to come. Raises Overloaded."""
        (permit,) = self.admit([nbytes])
        self._unfinished.add(permit)
        return permit

    def drop(self, permit: Permit) -> None:
        """The file will not come."""
        self._unfinished.discard(permit)
        permit.release()

    def start(self, items: Mapping[int, "Unprepared"], permits: Sequence[Permit]) -> None:
        """Decode items whose bytes have arrived; each is answered by the call. Takes over the permits."""
        for (index, item), permit in zip(items.items(), permits, strict=True):
            self._unfinished.discard(permit)
            self.call.expect(index)
            task = asyncio.create_task(self._run(index, item))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(partial(_release, permit))

    def note_pictures(self, items: Mapping[int, Item]) -> None:
        """Pictures among the items go to the engine, which prepares them."""
        for index, item in items.items():
            if item.is_picture:
                self.prepared.setdefault(index, Prepared(item.grid, ()))
                self.decoding.metrics.prepared(None)

    def close(self) -> None:
        """The RPC is over."""
        for permit in self._unfinished:
            permit.release()
        for task in self._tasks:
            task.cancel()

    async def _run(self, index: int, item: "Unprepared") -> None:
        try:
            await self._decode(index, item)
        except NotDecoded as error:
            self.decoding.metrics.decode_failed(error.fault)
            self.call.settle(index, error.of_item(f"items[{index}].{item.field}"))
        except EncoderError as error:
            self.call.settle(index, error)
        except Exception:  # noqa: BLE001 - a defect must not leave the client without an answer
            _log.exception("decoding failed")
            self.decoding.metrics.decode_failed(Fault.LOST)
            self.call.settle(index, EncodeFailed(f"items[{index}].{item.field}: decoding failed"))

    async def _decode(self, index: int, given: "Unprepared") -> None:
        pool, call = self.decoding.pool, self.call
        start = time.monotonic()
        flow = Flow(*call.caller, id(call), call.priority)
        if given.picture:
            measured = pool.measure_picture(given.picture, given.modality)
            attributes = _attributes(index, given, measured)
        else:
            measured = await pool.measure(flow, given.data, given.modality)
            attributes = _attributes(index, given, measured)
            trace_preparing(start, {"measure": time.monotonic() - start}, attributes)
            if is_elongated(measured.picture):
                measured = replace(measured, orientation=0)  # its kernel would take long
            if pool.takes_on_device(measured):
                measured = replace(measured, picture=())  # the engine gets what was prepared
        item = self.codec.measured(f"items[{index}]", given, measured, call.consumer)
        asked = time.monotonic()
        item = await call.placed(index, item, self.region_seconds)
        start += time.monotonic() - asked  # the client's time
        self.prepared[index] = Prepared(measured.grid, measured.frame_seconds)
        digest = await call.digest_unprepared(given)
        if digest and await call.answer(index, item, digest):
            return
        reserve = partial(call.reserve, index, item)
        began = time.monotonic()
        done = await pool.decode(
            flow, given.data, given.modality, measured, reserve, given.picture, raw=item.is_picture
        )
        seconds = time.monotonic() - start
        metrics = self.decoding.metrics
        metrics.decoded(given.modality, seconds)
        reason = self._reason(item, done)
        if reason or done.on_device:
            metrics.prepared(reason)
        stages = {"wait": done.waited, "decode": done.decode} | ({} if item.is_picture else {"prepare": done.prepare})
        where = Place.DEVICE if done.on_device else Place.CPU
        metrics.prepare_took(where, stages)
        place = {"vitwire.where": str(where)} | ({"vitwire.reason": str(reason)} if reason else {})
        trace_preparing(began, stages, {**attributes, **place})
        await call.submit({index: item.filled(done.pixels)}, {index: digest} if digest else {})

    def _reason(self, item: Item, done: Done) -> NotOnDevice | None:
        """Why a decoder prepared it on the CPU."""
        if done.on_device or item.is_picture:
            return None
        return self.decoding.preparation.reason or NotOnDevice.TOO_LARGE


def _attributes(index: int, given: "Unprepared", measured: Measured) -> Attributes:
    """Of the spans of a file or picture."""
    *_, height, width, _ = measured.picture
    return {
        "vitwire.item": index,
        "vitwire.modality": str(given.modality),
        "vitwire.bytes": given.nbytes,
        "vitwire.size": f"{width}x{height}",
    }


def _release(permit: Permit, task: asyncio.Task[None]) -> None:
    del task
    permit.release()
