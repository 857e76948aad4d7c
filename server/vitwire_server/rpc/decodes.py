"""Files and pictures of an RPC: prepared, and then submitted like other items."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from msgspec.structs import replace as changed

from vitwire.shared.fairness.shares import Path
from vitwire_children.serving import Fault, NotDone
from vitwire_server.core.errors import EncodeFailed, EncoderError, InvalidRequest, Overloaded, Violation
from vitwire_server.core.items import CacheLookup, Item
from vitwire_server.core.models import NotOnDevice, Place
from vitwire_server.observe.tracing import Attributes, trace_preparing
from vitwire_server.preparing.files.messages import Measured
from vitwire_server.preparing.files.pool import DecodePool
from vitwire_server.rpc.calls import Call
from vitwire_server.rpc.file_items import Decoding, Prepared, Unprepared, is_elongated

_log = logging.getLogger(__name__)
_EARLY = 64
"""Files that may wait for decoders while others reserve memory before they have one."""
_OTHER_SEED = 1
"""Changes the seed for digests of files, so that no pixels have the digest of a file."""


async def submit_all(call: Call, items: Sequence[Item | CacheLookup | Unprepared]) -> None:
    """Submit the items of one message, numbered in order; those with files once these were decoded.

    Raises as Session, for all items together.
    """
    files = {index: item for index, item in enumerate(items) if isinstance(item, Unprepared)}
    others = {index: item for index, item in enumerate(items) if not isinstance(item, Unprepared)}
    admit(call, files)
    if others:
        await call.submit(others)
    for index, item in files.items():
        # A view would keep the whole message, pixels of other items included.
        start(call, index, replace(item, data=bytes(item.data)))


def admit(call: Call, items: Mapping[int, Unprepared]) -> None:
    """Give each item a permit, all or none. Raises Overloaded."""
    if items:
        nbytes = [item.nbytes for item in items.values()]
        permits = _decoding(call).waiting.admit(nbytes, call.caller.name)
        for index, permit in zip(items, permits, strict=True):
            call.answers.item(index).permit = permit


def start(call: Call, index: int, item: Unprepared, region_seconds: float = 0.0) -> None:
    """Decode an admitted item, with its bytes, and submit it; its region is awaited for some seconds if it follows."""
    call.start(index, partial(_submit, call, index, item, region_seconds))


def _decoding(call: Call) -> Decoding:
    assert call.serving.decoding, "else the item was refused"
    return call.serving.decoding


async def _submit(call: Call, index: int, given: Unprepared, region_seconds: float) -> None:
    metrics, permit = _decoding(call).metrics, call.answers.item(index).permit
    try:
        await _decode(call, index, given, region_seconds)
    except NotDone as error:
        metrics.decode_failed(error.fault)
        field = f"items[{index}].{given.field}"
        if error.fault is Fault.LOST:
            raise EncodeFailed(f"{field}: {error}") from None
        raise InvalidRequest([Violation(field, str(error))]) from None
    except EncoderError:
        raise
    except Exception:  # noqa: BLE001 - a defect must not leave the client without an answer
        _log.exception("decoding failed")
        metrics.decode_failed(Fault.LOST)
        raise EncodeFailed(f"items[{index}].{given.field}: decoding failed") from None
    finally:
        if permit:
            permit.release()


async def _decode(call: Call, index: int, given: Unprepared, region_seconds: float) -> None:
    decoding = _decoding(call)
    pool, metrics = decoding.pool, decoding.metrics
    began = time.monotonic()
    flow = (call.priority, *call.caller, id(call))
    measured, attributes = await _measured(pool, flow, index, given)
    item = call.serving.codec.measured(f"items[{index}]", given, measured, call.consumer)
    call.answers.item(index).prepared = Prepared(measured.grid, measured.frame_seconds, measured.second_per_grid)
    asked = time.monotonic()
    item = await call.placed(index, item, region_seconds)
    began += time.monotonic() - asked  # the client's time
    digests = await call.digests({index: [repr((given.picture, given.frames)).encode(), given.data]}, _OTHER_SEED)
    if digests and await call.answer(index, item, digests[index]):
        return
    asked = time.monotonic()
    reserve = partial(call.reserve, index, item)
    if item.store_only and pool.waiting < _EARLY:  # its client waits for acceptance, and need not wait for a decoder
        with suppress(Overloaded):  # there may be room once it has a decoder
            reserve = partial(asyncio.sleep, 0, await reserve())
    done = await pool.decode(
        flow,
        given.data,
        given.modality,
        measured,
        reserve,
        given.picture,
        areas=given.areas,
        frames=given.frames,
        raw=item.is_picture,
    )
    metrics.decoded(given.modality, time.monotonic() - began)
    reason = None if done.on_device or item.is_picture else decoding.preparation.reason or NotOnDevice.TOO_LARGE
    if reason or done.on_device:
        metrics.prepared(reason)
    stages = {"wait": done.waited, "decode": done.decode} | ({} if item.is_picture else {"prepare": done.prepare})
    where = Place.DEVICE if done.on_device else Place.CPU
    metrics.prepare_took(where, stages)
    place = {"vitwire.where": str(where)} | ({"vitwire.reason": str(reason)} if reason else {})
    trace_preparing(asked, stages, {**attributes, **place})
    await call.submit({index: item.filled(done.pixels)}, digests)


async def _measured(pool: DecodePool, flow: Path, index: int, given: Unprepared) -> tuple[Measured, Attributes]:
    """Sizes of the prepared item, and attributes of its spans. Raises NotDone."""
    began = time.monotonic()
    if given.picture:
        measured = pool.measure_picture(given.picture, given.modality, given.areas)
    else:
        measured = await pool.measure(flow, given.data, given.modality, given.areas, given.frames)
    *_, height, width, _ = measured.picture
    attributes: Attributes = {
        "vitwire.item": index,
        "vitwire.modality": str(given.modality),
        "vitwire.bytes": given.nbytes,
        "vitwire.size": f"{width}x{height}",
    }
    if given.picture:
        return measured, attributes
    trace_preparing(began, {"measure": time.monotonic() - began}, attributes)
    if is_elongated(measured.picture):
        measured = changed(measured, orientation=0, film=None)  # its kernel would take long
    if pool.takes_on_device(measured):
        measured = changed(measured, picture=())  # the engine gets what was prepared
    return measured, attributes
