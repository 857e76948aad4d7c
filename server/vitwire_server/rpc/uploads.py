"""Items that arrive in chunks on one stream."""

from dataclasses import dataclass, field

from vitwire import wire
from vitwire.v1 import encoder_pb2 as pb
from vitwire_server.core.errors import EncoderError, InvalidRequest, Violation
from vitwire_server.core.items import DType
from vitwire_server.rpc.calls import Call
from vitwire_server.rpc.codec import Codec, Header


@dataclass(slots=True)
class _Upload:
    header: Header
    data: bytearray
    filled: int = 0


@dataclass(slots=True)
class Uploads:
    """Assembles items from the messages of a stream and submits each as soon as it is whole.

    A wrong item is answered on its own and its chunks are passed over; a message that names no
    item of the stream ends the stream.
    """

    codec: Codec
    call: Call
    output: DType
    most: int
    """Unfinished uploads that may be open at once."""
    _open: dict[int, _Upload] = field(default_factory=dict)
    _refused: set[int] = field(default_factory=set)
    _started: bool = False

    def take(self, message: pb.EncodeStreamRequest, data: wire.Buffer) -> None:
        """Handle one message. Raises InvalidRequest where the stream cannot go on."""
        kind = message.WhichOneof("message")
        if kind == "options":
            if self._started:
                raise _stream_error("options", "must come first, and once")
            self.output = self.codec.options(message.options)
        elif kind == "header":
            self._begin(message.header.item, message.header.header)
        elif kind == "chunk":
            self._append(message.chunk.item, data)
        else:
            raise _stream_error("message", "must hold options, a header or a chunk")
        self._started = True

    def finish(self) -> None:
        """The client sends no more: what is not whole by now is wrong."""
        for number, upload in list(self._open.items()):
            reason = f"only {upload.filled} of {upload.header.nbytes} bytes arrived"
            self._refuse(number, InvalidRequest([Violation(f"items[{number}].pixels.data", reason)]))

    def _begin(self, number: int, item: pb.Item) -> None:
        if number in self._open or self.call.holds(number):
            raise _stream_error("header.item", f"{number} is in flight already")
        if len(self._open) >= self.most:
            raise _stream_error("header.item", f"more than {self.most} uploads are unfinished")
        self._refused.discard(number)
        try:
            header = self.codec.header(f"items[{number}]", item)
            self.call.admit(number, header.nbytes)
        except EncoderError as error:
            self._refuse(number, error)
            return
        self._open[number] = _Upload(header, bytearray(header.nbytes))

    def _append(self, number: int, data: wire.Buffer) -> None:
        if number in self._refused:
            return
        upload = self._open.get(number)
        if upload is None:
            raise _stream_error("chunk.item", f"{number} has no header, or is whole already")
        end = upload.filled + len(data)
        if end > upload.header.nbytes:
            reason = f"more than the {upload.header.nbytes} bytes that type and shape ask for arrived"
            self._refuse(number, InvalidRequest([Violation(f"items[{number}].pixels.data", reason)]))
            return
        upload.data[upload.filled : end] = data
        upload.filled = end
        if end == upload.header.nbytes:
            del self._open[number]
            self.call.submit([(number, upload.header.item(upload.data, self.output))])

    def _refuse(self, number: int, error: EncoderError) -> None:
        self._open.pop(number, None)
        self._refused.add(number)
        self.call.settle(number, error)


def _stream_error(field: str, reason: str) -> InvalidRequest:
    return InvalidRequest([Violation(field, reason)])
