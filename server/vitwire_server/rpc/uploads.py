"""Items that arrive in chunks on one stream."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from xxhash import xxh3_128

from vitwire import wire
from vitwire.v1 import encoder_pb2 as pb
from vitwire_server.core.errors import DeadlineExceeded, EncoderError, InvalidRequest, Overloaded, Violation
from vitwire_server.core.items import CacheLookup, Item
from vitwire_server.rpc import decodes
from vitwire_server.rpc.calls import Call
from vitwire_server.rpc.checks import consumer_of, refuse, region_of, violations
from vitwire_server.rpc.codec import parsed
from vitwire_server.rpc.file_items import Unprepared
from vitwire_server.rpc.grpc_types import Stream, read, wait_for_cancellation

Chunk: TypeAlias = wire.Frame[pb.EncodeStreamRequest] | wire.Malformed
_IDLE_FACTOR = 10
"""A stream with nothing in flight may stay open for this many times as long as an upload may stall."""
_SLOWEST = 64 << 10
"""Bytes a second that an upload must reach: from its header on it holds a permit for all of its bytes."""
_REMEMBERED = 4096
"""Refused items of a stream that are kept by number; beyond that, chunks of unknown items are ignored too."""


@dataclass(slots=True)
class _Upload:
    item: Item | Unprepared
    """Without its bytes."""
    data: memoryview
    due: float
    """When it counts as stalled unless more bytes arrive, on the clock of `Uploads._waited`."""
    digest: xxh3_128 | None = None
    """None if nothing is cached, or the item is a file or picture."""
    filled: int = 0

    @property
    def last_field(self) -> str:
        """The field that the last bytes belong to."""
        if isinstance(self.item, Unprepared):
            return "pixels.data" if self.item.picture else "encoded"
        return "crops.data" if self.item.crops else "pixels.data"

    @property
    def next_field(self) -> str:
        """The field that the next bytes belong to."""
        if isinstance(self.item, Item) and self.filled < self.item.pixels.nbytes:
            return "pixels.data"
        return self.last_field


class Uploads:
    """Assembles items from the messages of a stream and submits each as soon as it is complete.

    An invalid item is answered at once and its chunks are ignored; a message that names no item of the
    stream ends the stream.
    """

    def __init__(self, call: Call, stall_seconds: float) -> None:
        """An upload may lag `stall_seconds` behind the slowest rate."""
        self._call = call
        self._codec = call.serving.codec
        self._output = call.serving.card.dtype
        self._most = call.serving.card.limits.items_per_request
        """Unfinished uploads that may be open at once."""
        self._stall_seconds = stall_seconds
        self._waited = 0.0
        """Seconds spent waiting for the client's messages; time that the server takes does not count."""
        self._unfinished: dict[int, _Upload] = {}
        self._refused: set[int] = set()
        self._forgot = False
        """Whether more were refused than are remembered."""
        self._started = False

    async def read_all(self, context: Stream[Chunk, Any]) -> None:
        """Handle all messages. Raises InvalidRequest or DeadlineExceeded if the stream cannot continue."""
        answers = self._call.answers
        while (message := await self._next(context)) is not None:
            frame = parsed(message)
            await self._take(frame.message, frame.data)
            # Twice as many as may wait for other items, which may be those whose bytes are to be read.
            await answers.room(2 * self._most, self._unfinished)
        if self._unfinished:
            await wait_for_cancellation()
        self._finish()
        answers.end()

    async def _next(self, context: Stream[Chunk, Any]) -> Chunk | None:
        number, first = min(self._unfinished.items(), key=lambda each: each[1].due, default=(0, None))
        idle = None if self._call.answers.items else self._stall_seconds * _IDLE_FACTOR
        seconds = max(0.0, first.due - self._waited) if first else idle
        start = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                return await read(context)
        except TimeoutError:
            reason = f"no message arrived for {seconds:.3g} s while nothing was in flight"
            if first:
                reason = f"items[{number}]: upload stalled at {first.filled} of {first.item.nbytes} bytes"
                reason += f", {self._stall_seconds:g} s behind the minimum of {_SLOWEST >> 10} KiB/s"
            raise DeadlineExceeded(reason) from None
        finally:
            self._waited += time.monotonic() - start

    async def _take(self, message: pb.EncodeStreamRequest, data: wire.Buffer) -> None:
        kind = message.WhichOneof("message")
        if kind == "options":
            if self._started:
                raise _stream_error("options", "must be the first message, and sent once")
            self._output, self._call.priority = self._codec.options(message.options)
            self._call.consumer = consumer_of(message.options, self._call.principal, "options.delivery")
        elif kind == "header":
            await self._begin(message.header)
        elif kind == "region":
            self._place(message.region)
        elif kind == "chunk":
            await self._append(message.chunk.item, data)
        else:
            raise _stream_error("message", "must hold options, a header, a region or a chunk")
        self._started = True

    def _finish(self) -> None:
        """The client sends no more: refuse unfinished uploads."""
        for item in self._call.answers.items.values():
            item.place(None)
        for number, upload in list(self._unfinished.items()):
            reason = f"received only {upload.filled} of {upload.item.nbytes} bytes"
            self._refuse(number, InvalidRequest([Violation(f"items[{number}].{upload.next_field}", reason)]))

    async def _begin(self, message: pb.EncodeStreamHeader) -> None:
        number = message.item
        if number in self._call.answers.items:
            raise _stream_error("header.item", f"item {number} is already in flight")
        if len(self._unfinished) >= self._most:
            raise _stream_error("header.item", f"more than {self._most} uploads are unfinished")
        self._refused.discard(number)
        try:
            if message.region_follows:
                self._ask_region(message)
            upload = await self._upload(number, message.header, message.encoded_bytes)
        except EncoderError as error:
            self._refuse(number, error)
        else:
            if upload:
                self._unfinished[number] = upload

    async def _upload(self, number: int, item: pb.Item, file_bytes: int) -> _Upload | None:
        """The upload that receives the item's bytes; None if it has none. Raises EncoderError."""
        call, codec, field = self._call, self._codec, f"items[{number}]"
        due = self._waited + self._stall_seconds
        if codec.is_unprepared(item, file_bytes):
            file = codec.unprepared(field, item, file_bytes, self._output)
            call.claim(number, region_of(item))
            decodes.admit(call, {number: file})
            return _Upload(file, np.empty(file.nbytes, np.uint8).data, due)
        header = codec.header(field, item, self._output, call.consumer)
        call.claim(number, region_of(item))
        if isinstance(header, CacheLookup):
            await call.submit({number: header})
            return None
        data = await call.reserve(number, header)
        seed = call.serving.sessions.digest_seed
        return _Upload(header, data, due, None if seed is None else xxh3_128(seed=seed))

    def _ask_region(self, message: pb.EncodeStreamHeader) -> None:
        """The item's region follows. Raises InvalidRequest or Overloaded."""
        item, answers = message.header, self._call.answers
        has_content = message.encoded_bytes or item.HasField("pixels")
        wrong = violations(
            ("region_follows", "needs a delivery in the request", self._call.consumer is None),
            ("region_follows", "must be false for an item with a region", item.HasField("region")),
            ("region_follows", "must be false for an item whose rows are only stored", item.store_only),
            ("region_follows", "must be false for an item without content", not has_content),
        )
        refuse(wrong, f"items[{message.item}]")
        if sum(each.awaits_region for each in answers.items.values()) >= self._most:
            text = f"{self._most} items of this RPC wait for their regions: send those first"
            raise Overloaded(text, reason="items", retry_seconds=1.0)
        answers.item(message.item).region = asyncio.get_running_loop().create_future()

    def _place(self, message: pb.EncodeStreamRegion) -> None:
        """A region arrived; it is ignored if its item is answered."""
        item = self._call.answers.items.get(message.item)
        if item and item.region:
            item.place(region_of(message))
        elif item and not item.answered:
            raise _stream_error("region.item", f"the header of item {message.item} did not announce a region")

    async def _append(self, number: int, data: wire.Buffer) -> None:
        upload = self._unfinished.get(number)
        if upload is None:
            if number in self._refused or self._forgot:
                return
            raise _stream_error("chunk.item", f"item {number} has no header, or is already complete")
        end = upload.filled + len(data)
        if end > upload.item.nbytes:
            announced = "data_type and shape" if upload.last_field.endswith(".data") else "encoded_bytes"
            reason = f"received more than the {upload.item.nbytes} bytes that {announced} require"
            self._refuse(number, InvalidRequest([Violation(f"items[{number}].{upload.last_field}", reason)]))
            return
        upload.data[upload.filled : end] = data
        upload.filled = end
        upload.due = min(upload.due + len(data) / _SLOWEST, self._waited + self._stall_seconds)
        if upload.digest:
            upload.digest.update(data)
        if end == upload.item.nbytes:
            await self._submit(number, upload)

    async def _submit(self, number: int, upload: _Upload) -> None:
        call = self._call
        del self._unfinished[number]
        if isinstance(upload.item, Unprepared):
            decodes.start(call, number, replace(upload.item, data=upload.data), self._stall_seconds)
            return
        item = upload.item.filled(upload.data)
        digests = {number: upload.digest.digest()} if upload.digest else {}
        if call.answers.item(number).region:
            call.start(number, partial(self._submit_late, number, item, digests))
            return
        try:
            await call.submit({number: item}, digests)
        except DeadlineExceeded as error:
            self._refuse(number, error)

    async def _submit_late(self, number: int, item: Item, digests: Mapping[int, bytes]) -> None:
        """Submit an item with all its bytes once its region is known."""
        await self._call.submit({number: await self._call.placed(number, item, self._stall_seconds)}, digests)

    def _refuse(self, number: int, error: EncoderError) -> None:
        self._unfinished.pop(number, None)
        if len(self._refused) < _REMEMBERED:
            self._refused.add(number)
        else:
            self._forgot = True
        self._call.answers.settle(number, error)


def _stream_error(field: str, reason: str) -> InvalidRequest:
    return InvalidRequest([Violation(field, reason)])
