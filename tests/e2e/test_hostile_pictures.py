"""Hostile pictures and files beside good ones, through one real server: each is refused alone, by its field."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from threading import Event

import grpc
import numpy as np
import pytest

from checkpoints import Checkpoints
from encoded_files import photograph, saved
from odd_files import BAD, BMPS, GIFS
from servers import ServerProcess, serving
from vitwire.v1 import encoder_pb2 as pb
from vitwire.v1 import encoder_pb2_grpc as rpc

IMAGE, VIDEO = pb.MODALITY_IMAGE, pb.MODALITY_VIDEO
BYTES = pb.DATA_TYPE_UINT8
FLAGS = ("--dtype", "float32", "--decode-processes", "1", "--prepare", "device", "--rpc-processes", "2")
KEPT = ("vitwire_admitted_bytes", "vitwire_admitted_items", "vitwire_decode_waiting")
"""Metrics that are 0 once nothing is in flight."""
Answers = Mapping[int, bytes | str]
"""The rows of an item, or its error."""


def picture(
    *shape: int, modality: "pb.Modality.ValueType" = IMAGE, data: bytes | None = None, kind: int = BYTES
) -> pb.Item:
    tensor = pb.Tensor(data_type=kind, shape=shape, data=bytes(prod(shape)) if data is None else data)
    return pb.Item(modality=modality, pixels=tensor)


def file(data: bytes) -> pb.Item:
    return pb.Item(modality=IMAGE, encoded=data)


GOOD = [
    picture(64, 80, 3, data=np.asarray(photograph(64, 80)).tobytes()),
    picture(64, 80, 4, data=np.asarray(photograph(64, 80).convert("RGBA")).tobytes()),
    file(saved(photograph(90, 70), "GIF")),
    picture(3, 64, 64, 3, modality=VIDEO, data=np.asarray(photograph(192, 64)).tobytes()),
]
"""For the device, for a decoder and then the device, a file, and a clip."""
REFUSED = {
    "no shape": (picture(data=b""), "items[0].grid: is missing"),
    "one axis": (picture(3), "items[0].grid: is missing"),
    "two axes": (picture(9, 3), "items[0].grid: is missing"),
    "one channel": (picture(9, 9, 1), "items[0].grid: is missing"),
    "five channels": (picture(9, 9, 5), "items[0].grid: is missing"),
    "floats": (picture(9, 9, 3, kind=pb.DATA_TYPE_FLOAT32), "items[0].grid: is missing"),
    "an unknown type": (picture(9, 9, 3, kind=99), "items[0].grid: is missing"),
    "no height": (picture(0, 9, 3), "items[0].pixels.shape: must have at least one pixel"),
    "no width": (picture(9, 0, 4), "items[0].pixels.shape: must have at least one pixel"),
    "no frames": (picture(0, 64, 64, 3, modality=VIDEO), "items[0].pixels.shape: must have at least one pixel"),
    "one frame": (picture(1, 64, 64, 3, modality=VIDEO), "items[0].pixels: this model needs clips of at least 2"),
    "a clip as an image": (picture(2, 64, 64, 3), "items[0].grid: is missing"),
    "an image as a clip": (picture(64, 64, 3, modality=VIDEO), "items[0].grid: is missing"),
    "too large": (picture(60_000, 60_000, 3, data=b"few"), "items[0].pixels.shape: is a picture of 60000x60000"),
    "beyond 64 bits": (picture(1 << 63, 1 << 63, 3, data=b"few"), "items[0].pixels.shape: is a picture of"),
    "too many frames": (picture(1 << 62, 64, 64, 3, modality=VIDEO, data=b""), "items[0].pixels.shape: takes"),
    "too many patches": (picture(100_000, 1, 1, 3, modality=VIDEO), "items[0].grid: has"),
    "too few bytes": (picture(900, 900, 3, data=b"few"), "items[0].pixels.data: has 3 bytes"),
    "too few bytes for a decoder": (picture(8000, 8000, 3, data=b"few"), "items[0].pixels.data: has 3 bytes"),
    "too few bytes with alpha": (picture(90, 90, 4, data=b"few"), "items[0].pixels.data: has 3 bytes"),
    "too many bytes": (picture(9, 9, 3, data=bytes(244)), "items[0].pixels.data: has 244 bytes"),
    "crops": (pb.Item(modality=IMAGE, pixels=GOOD[0].pixels, crops=GOOD[0].pixels), "items[0].crops: must be absent"),
    "a file too": (pb.Item(modality=IMAGE, pixels=GOOD[0].pixels, encoded=b"GIF89a"), "items[0].encoded: must be"),
    "another modality": (picture(9, 9, 3, modality=9), "items[0].modality: must be"),
}
"""What a request is refused for, and the beginning of the reason."""
LATE = {
    "elongated": (picture(1, 201, 3), "pixels: 1x201 is too elongated"),
    "elongated, with alpha": (picture(1, 300, 4), "pixels: 1x300 is too elongated"),
    "one frame with alpha": (picture(1, 64, 64, 4, modality=VIDEO), "pixels: this model needs clips of at least 2"),
    "an image as a clip": (pb.Item(modality=VIDEO, encoded=b"GIF89a"), "encoded: is neither an MP4"),
} | {name: (file(make()), "encoded: ") for name, (make, part) in BAD.items()}
"""What only its item is refused for, once a decoder was asked."""


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints) -> Iterator[ServerProcess]:
    with serving(checkpoints("qwen3_vl"), *FLAGS) as process:
        yield process
        assert {name: process.metric(name) for name in KEPT} == dict.fromkeys(KEPT, 0.0)
        assert "Traceback" not in process.log()


def answers(stub: rpc.EncoderServiceStub, items: Sequence[pb.Item]) -> Answers:
    found: dict[int, bytes | str] = {}
    for answer in stub.Encode(pb.EncodeRequest(items=items), timeout=60):
        if answer.WhichOneof("result") == "chunk":
            found[answer.item] = bytes(found.get(answer.item, b"")) + answer.chunk.data
        else:
            found[answer.item] = answer.error.message
    return found


def uploaded(stub: rpc.EncoderServiceStub, item: pb.Item, data: bytes, file_bytes: int = 0) -> Sequence[str]:
    """The errors of an item that is uploaded in two chunks."""
    header = pb.EncodeStreamHeader(item=0, header=item, encoded_bytes=file_bytes)
    half = len(data) // 2
    chunks = [pb.EncodeStreamChunk(item=0, data=part) for part in (data[:half], data[half:])]
    sent = [pb.EncodeStreamRequest(header=header), *(pb.EncodeStreamRequest(chunk=chunk) for chunk in chunks)]
    return [answer.error.message for answer in stub.EncodeStream(iter(sent), timeout=60)]


def unfinished(sent: Sequence[pb.EncodeStreamRequest], over: Event) -> Iterator[pb.EncodeStreamRequest]:
    """Messages of a client that does not say that there are no more."""
    yield from sent
    over.wait()


def assert_good(found: Answers, expected: Answers, first: int = 0) -> None:
    for index, rows in expected.items():
        own = found[first + index]
        assert isinstance(own, bytes), own
        assert isinstance(rows, bytes)
        np.testing.assert_allclose(np.frombuffer(own, "f4"), np.frombuffer(rows, "f4"), rtol=0, atol=1e-5)


def test_requests_with_wrong_pictures_are_refused(stub: rpc.EncoderServiceStub) -> None:
    for name, (item, reason) in REFUSED.items():
        with pytest.raises(grpc.RpcError) as caught:
            answers(stub, [item, GOOD[0]])
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
        assert caught.value.details().startswith(reason), name


def test_bad_files_and_pictures_fail_alone(stub: rpc.EncoderServiceStub) -> None:
    """Good ones in the same request have the rows that they have without."""
    expected = answers(stub, GOOD)
    found = answers(stub, [*(item for item, _ in LATE.values()), *GOOD])
    for index, (name, (_, reason)) in enumerate(LATE.items()):
        assert f"items[{index}].{reason}" in str(found[index]), name
    for index, (name, (_, part)) in enumerate(BAD.items(), len(LATE) - len(BAD)):
        assert part in str(found[index]), name
    assert_good(found, expected, len(LATE))


def test_odd_files_are_encoded(stub: rpc.EncoderServiceStub) -> None:
    found = answers(stub, [file(make()) for make in (GIFS | BMPS).values()])
    assert all(isinstance(rows, bytes) for rows in found.values())


def test_uploads_that_are_cut_off_or_too_long(stub: rpc.EncoderServiceStub) -> None:
    header = pb.Item(modality=IMAGE, pixels=pb.Tensor(data_type=BYTES, shape=(64, 80, 3)))
    alpha = pb.Item(modality=IMAGE, pixels=pb.Tensor(data_type=BYTES, shape=(64, 80, 4)))
    for item, size in ((header, 64 * 80 * 3), (alpha, 64 * 80 * 4)):
        (short,) = uploaded(stub, item, bytes(size - 1))
        assert short == f"items[0].pixels.data: received only {size - 1} of {size} bytes"
        (long,) = uploaded(stub, item, bytes(size + 1))
        assert long.startswith(f"items[0].pixels.data: received more than the {size} bytes")
    (short,) = uploaded(stub, pb.Item(modality=IMAGE), bytes(99), 100)
    assert short == "items[0].encoded: received only 99 of 100 bytes"
    (huge,) = uploaded(stub, pb.Item(modality=IMAGE), b"few", 1 << 60)
    assert huge.startswith(f"items[0].encoded: has {1 << 60} bytes")
    (inline,) = uploaded(stub, GOOD[1], b"")
    assert inline == "items[0].pixels.data: must be empty: the bytes follow in chunks"


def test_uploads_that_are_cancelled_leave_nothing(server: ServerProcess, stub: rpc.EncoderServiceStub) -> None:
    """Halves of pictures for the device and for a decoder, and of a file; `server` checks what is held at the end."""
    expected = answers(stub, GOOD)
    photo = saved(photograph(400, 500))
    for item, size in ((picture(640, 800, 3), 0), (picture(640, 800, 4), 0), (file(photo), len(photo))):
        data = item.pixels.data or item.encoded
        item.pixels.ClearField("data")
        header = pb.Item(modality=IMAGE) if size else item
        sent = [
            pb.EncodeStreamRequest(header=pb.EncodeStreamHeader(item=0, header=header, encoded_bytes=size)),
            pb.EncodeStreamRequest(chunk=pb.EncodeStreamChunk(item=0, data=data[: len(data) // 2])),
            pb.EncodeStreamRequest(header=pb.EncodeStreamHeader(item=1, header=pb.Item())),  # is refused at once
        ]
        over = Event()
        call = stub.EncodeStream(unfinished(sent, over), timeout=60)
        assert next(call).item == 1, "the half has arrived before"
        call.cancel()
        over.set()
    assert_good(answers(stub, GOOD), expected)
