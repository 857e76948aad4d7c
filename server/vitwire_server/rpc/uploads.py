"""Items that arrive in chunks on one stream."""

from dataclasses import dataclass, field, replace

import numpy as np

from vitwire import wire
from vitwire.v1 import encoder_pb2 as pb
from vitwire_server.caching.keys import Digest
from vitwire_server.core.errors import DeadlineExceeded, EncoderError, InvalidRequest, Overloaded, Violation
from vitwire_server.core.items import CacheLookup, DType, Item
from vitwire_server.rpc.calls import Call
from vitwire_server.rpc.codec import Codec
from vitwire_server.rpc.deliveries import consumer_of, region_of
from vitwire_server.rpc.unprepared import Unprepared
from vitwire_server.scheduling.admission import Permit

_SLOWEST = 64 << 10
"""Bytes a second that an upload must reach: from its header on it holds a permit for all of its bytes."""
_REMEMBERED = 4096
"""Refused items of a stream that are kept by number; beyond that, chunks of unknown items are ignored too."""


@dataclass(slots=True)
class _Upload:
    item: Item | Unprepared
    """Without its bytes."""
    data: memoryview
    digest: Digest | None
    """None where nothing is cached."""
    due: float
    """When it counts as stalled unless more bytes arrive, on the clock of `Uploads.waited`."""
    permit: Permit | None = None
    """Of a file or picture."""
    filled: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole item."""
        return self.item.nbytes

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


@dataclass(slots=True)
class Uploads:
    """Assembles items from the messages of a stream and submits each as soon as it is complete.

    An invalid item is answered at once and its chunks are ignored; a message that names no item of the
    stream ends the stream.
    """

    codec: Codec
    call: Call
    output: DType
    most: int
    """Unfinished uploads that may be open at once."""
    stall_seconds: float
    """Seconds that an upload may lag behind the slowest rate."""
    waited: float = 0.0
    """Seconds spent waiting for the client's messages; time that the server takes does not count."""
    _unfinished: dict[int, _Upload] = field(default_factory=dict)
    _refused: set[int] = field(default_factory=set)
    _forgot: bool = False
    """Whether more were refused than are remembered."""
    _started: bool = False

    @property
    def waiting(self) -> bool:
        """Whether an upload is unfinished."""
        return bool(self._unfinished)

    def time_left(self) -> float:
        """Seconds until an upload counts as stalled."""
        return max(0.0, min(upload.due for upload in self._unfinished.values()) - self.waited)

    def stalled(self) -> DeadlineExceeded:
        """The error that ends the stream once no time is left."""
        number, upload = min(self._unfinished.items(), key=lambda each: each[1].due)
        reason = f"items[{number}]: upload stalled at {upload.filled} of {upload.nbytes} bytes"
        return DeadlineExceeded(f"{reason}, {self.stall_seconds:g} s behind the minimum of {_SLOWEST >> 10} KiB/s")

    async def take(self, message: pb.EncodeStreamRequest, data: wire.Buffer) -> None:
        """Handle one message. Raises InvalidRequest if the stream cannot continue."""
        kind = message.WhichOneof("message")
        if kind == "options":
            if self._started:
                raise _stream_error("options", "must be the first message, and sent once")
            self.output, priority = self.codec.options(message.options)
            self.call.priority = priority
            self.call.consumer = consumer_of(message.options, self.call.principal, "options.delivery")
        elif kind == "header":
            await self._begin(message.header)
        elif kind == "region":
            number = message.region.item
            if not self.call.set_region(number, region_of(message.region)):
                raise _stream_error("region.item", f"the header of item {number} did not announce a region")
        elif kind == "chunk":
            await self._append(message.chunk.item, data)
        else:
            raise _stream_error("message", "must hold options, a header, a region or a chunk")
        self._started = True

    def finish(self) -> None:
        """The client sends no more: refuse unfinished uploads."""
        self.call.end_regions()
        for number, upload in list(self._unfinished.items()):
            reason = f"received only {upload.filled} of {upload.nbytes} bytes"
            self._refuse(number, InvalidRequest([Violation(f"items[{number}].{upload.next_field}", reason)]))

    async def _begin(self, message: pb.EncodeStreamHeader) -> None:
        number, item = message.item, message.header
        if self.call.is_open(number):
            raise _stream_error("header.item", f"item {number} is already in flight")
        if len(self._unfinished) >= self.most:
            raise _stream_error("header.item", f"more than {self.most} uploads are unfinished")
        self._refused.discard(number)
        try:
            if message.region_follows:
                self._ask_region(number, item, message.encoded_bytes)
            if self.codec.is_unprepared(item, message.encoded_bytes):
                self._unfinished[number] = self._begin_unprepared(number, item, message.encoded_bytes)
                return
            header = self.codec.header(f"items[{number}]", item, self.output, self.call.consumer)
            self.call.claim(number, region_of(item))
            if isinstance(header, CacheLookup):
                await self.call.submit({number: header})
                return
            data = await self.call.reserve(number, header)
        except EncoderError as error:
            self._refuse(number, error)
            return
        self._unfinished[number] = _Upload(header, data, self.call.digest(), self.waited + self.stall_seconds)

    def _ask_region(self, number: int, item: pb.Item, file_bytes: int) -> None:
        """The item's region follows. Raises InvalidRequest or Overloaded."""
        reasons = {
            "needs the delivery of the request": self.call.consumer is None,
            "must be false for an item with a region": item.HasField("region"),
            "must be false for an item whose rows are only stored": item.store_only,
            "must be false for an item without content": not (file_bytes or item.HasField("pixels")),
        }
        wrong = [Violation(f"items[{number}].region_follows", reason) for reason, is_so in reasons.items() if is_so]
        if wrong:
            raise InvalidRequest(wrong)
        if self.call.awaited_regions >= self.most:
            text = f"{self.most} items of this RPC wait for their regions: send those first"
            raise Overloaded(text, reason="items", retry_seconds=1.0)
        self.call.ask_region(number)

    def _begin_unprepared(self, number: int, item: pb.Item, file_bytes: int) -> _Upload:
        """The upload of a file or picture. Raises InvalidRequest or Overloaded."""
        header = self.codec.unprepared_header(f"items[{number}]", item, file_bytes, self.output)
        self.call.claim(number, region_of(item))
        decodes = self.call.decodes
        assert decodes, "else the header was refused"
        decodes.region_seconds = self.stall_seconds
        permit = decodes.promise(header.nbytes)
        data = np.empty(header.nbytes, np.uint8).data
        self.call.expect(number, submitted=False)
        return _Upload(header, data, None, self.waited + self.stall_seconds, permit)

    async def _append(self, number: int, data: wire.Buffer) -> None:
        upload = self._unfinished.get(number)
        if upload is None:
            if number in self._refused or self._forgot:
                return
            raise _stream_error("chunk.item", f"item {number} has no header, or is already complete")
        end = upload.filled + len(data)
        if end > upload.nbytes:
            announced = "data_type and shape" if upload.last_field.endswith(".data") else "encoded_bytes"
            reason = f"received more than the {upload.nbytes} bytes that {announced} require"
            self._refuse(number, InvalidRequest([Violation(f"items[{number}].{upload.last_field}", reason)]))
            return
        upload.data[upload.filled : end] = data
        upload.filled = end
        upload.due = min(upload.due + len(data) / _SLOWEST, self.waited + self.stall_seconds)
        if upload.digest:
            upload.digest.add(data)
        if end == upload.nbytes:
            await self._submit(number, upload)

    async def _submit(self, number: int, upload: _Upload) -> None:
        del self._unfinished[number]
        if isinstance(upload.item, Unprepared):
            assert self.call.decodes, "else the header was refused"
            assert upload.permit, "of every file and picture"
            self.call.decodes.start({number: replace(upload.item, data=upload.data)}, [upload.permit])
            return
        digests = {number: upload.digest.value()} if upload.digest else {}
        if self.call.is_late(number):
            self.call.submit_placed(number, upload.item.filled(upload.data), digests, self.stall_seconds)
            return
        try:
            await self.call.submit({number: upload.item.filled(upload.data)}, digests)
        except DeadlineExceeded as error:
            self._refuse(number, error)

    def _refuse(self, number: int, error: EncoderError) -> None:
        upload = self._unfinished.pop(number, None)
        if upload and upload.permit and self.call.decodes:
            self.call.decodes.drop(upload.permit)
        if len(self._refused) < _REMEMBERED:
            self._refused.add(number)
        else:
            self._forgot = True
        self.call.settle(number, error)


def _stream_error(field: str, reason: str) -> InvalidRequest:
    return InvalidRequest([Violation(field, reason)])
