"""JPEG files decoded beside the engine by nvImageCodec: here on the CPU, by its libjpeg-turbo."""

import asyncio
import gc
import os
import random
import signal
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.ExifTags import Base

from entered import entered_async
from prepared import MODELS
from vitwire_children.serving import Fault, NotDone
from vitwire_server.config.settings import ServeSettings
from vitwire_server.core.items import Areas, Modality
from vitwire_server.core.models import NotOnDevice, Place
from vitwire_server.preparing import pillow
from vitwire_server.preparing.device import hardware
from vitwire_server.preparing.device.hardware import Hardware, fault_of
from vitwire_server.preparing.files import decoders
from vitwire_server.preparing.files.decoders import Decoder
from vitwire_server.preparing.files.images import is_plain
from vitwire_server.preparing.files.messages import Setup, Sizes
from vitwire_server.preparing.files.pool import DecodePool, Prepared
from vitwire_server.process.file_decoding import decoded_on

FLOW = (0, "a caller")
RECIPES = MODELS["patches"]


def drawn(height: int = 90, width: int = 130, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def jpeg(image: Image.Image, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[Base.Orientation] = orientation
    return jpeg(drawn(), exif=exif)


def framed(data: bytes, side: int, before: bytes = b"", after: bytes = b"") -> bytes:
    """The file with a frame of so many pixels a side, between other bytes; `after` ends with the frame it had."""
    at = data.index(b"\xff\xc0")
    frame = data[at : at + 19]
    own = frame[:5] + struct.pack(">HH", side, side) + frame[9:]
    return data[:at] + before + own + (after + frame if after else b"") + data[at + 19 :]


def with_two_frames(marker: int) -> bytes:
    """A segment whose content is a frame, which Pillow reads, behind a larger one, which nvImageCodec reads."""
    return framed(jpeg(drawn()), 20_000, after=bytes([0xFF, marker, 0, 2 + 19]))


PLAIN = {
    "4:2:0": jpeg(drawn()),
    "4:2:2": jpeg(drawn(), subsampling="4:2:2"),
    "4:4:4": jpeg(drawn(), subsampling="4:4:4"),
    "odd sides": jpeg(drawn(91, 127)),
    "grey": jpeg(drawn().convert("L")),
    "restart markers": jpeg(drawn(), restart_marker_blocks=3),
    "optimised": jpeg(drawn(), optimize=True, quality=98),
    "bytes behind it": jpeg(drawn()) + bytes(100),
    "a profile": jpeg(drawn(), icc_profile=bytes(3000), comment=b"of a camera"),
    **{f"orientation {number}": turned(number) for number in range(1, 9)},
}
OTHERS = {
    "progressive": jpeg(drawn(), progressive=True),
    "CMYK": jpeg(drawn().convert("CMYK")),
    "RGB": jpeg(drawn(), keep_rgb=True),
    "grey with factors": jpeg(drawn().convert("L")).replace(b"\x01\x01\x11\x00", b"\x01\x01\x22\x00", 1),
    "two frames": framed(jpeg(drawn()), 200, before=jpeg(drawn())[158:177]),
    "a frame that only Pillow reads": with_two_frames(0xC8),
    "a frame behind a restart marker": with_two_frames(0xD0),
    "extended": jpeg(drawn()).replace(b"\xff\xc0", b"\xff\xc1", 1),
    "quantisation of 16 bits": jpeg(drawn())[:2] + b"\xff\xdb\x00\x83\x10" + bytes(128) + jpeg(drawn())[2:],
    "another order of components": jpeg(drawn()).replace(
        b"\x03\x01\x00\x02\x11\x03\x11", b"\x03\x02\x11\x01\x00\x03\x11", 1
    ),
    "some coefficients": jpeg(drawn()).replace(b"\x03\x11\x00\x3f\x00", b"\x03\x11\x00\x3e\x00", 1),
    "small": jpeg(drawn(15, 200)),
    "cut": jpeg(drawn())[:-400],
    "PNG": b"\x89PNG" + bytes(100),
    "nothing": b"",
}


# -- which files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN | OTHERS)
def test_which_files_are_plain(name: str) -> None:
    assert is_plain((PLAIN | OTHERS)[name]) is (name in PLAIN)


def test_any_bytes_are_judged() -> None:
    rng = random.Random(0)
    for data in PLAIN.values():
        for _ in range(50):
            broken = bytearray(data)
            for _ in range(rng.randrange(1, 6)):
                broken[rng.randrange(min(len(broken), 700))] = rng.randrange(256)
            assert is_plain(bytes(broken)) in (True, False)
            assert is_plain(bytes(broken[: rng.randrange(len(broken))])) in (True, False)


# -- pixels ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoder() -> Hardware:
    return Hardware("cpu")


def orientation_of(data: bytes) -> int:
    return int(Image.open(BytesIO(data)).getexif().get(Base.Orientation, 1))


@pytest.mark.parametrize("name", PLAIN)
def test_pixels_are_pillow_s(name: str, decoder: Hardware) -> None:
    expected = ImageOps.exif_transpose(Image.open(BytesIO(PLAIN[name]))).convert("RGB")
    own = decoder.decoded(PLAIN[name], orientation_of(PLAIN[name]))
    np.testing.assert_array_equal(own.numpy(), np.asarray(expected))


def test_no_pixels_are_left_behind(decoder: Hardware) -> None:
    """A file that is cut within its pixels shows nothing of the one before."""
    white = Image.fromarray(np.full((64, 64, 3), 255, np.uint8))
    decoder.decoded(jpeg(white), 1)
    assert not decoder._pixels().any()
    cut = jpeg(drawn(64, 64))[:-900] + b"\xff\xd9"
    assert is_plain(cut)
    try:
        own = decoder.decoded(cut, 1).numpy()
    except NotDone:
        return
    assert not (own == 255).all(axis=2).any()


def test_the_size_is_checked_before_memory_is_reserved(decoder: Hardware) -> None:
    """Of a file whose size was misread: else a header reserves 12 GB."""
    with pytest.raises(NotDone, match="larger picture"):
        decoder.decoded(framed(PLAIN["4:4:4"], 20_000), 1)
    with pytest.raises(NotDone):
        decoder.decoded(PLAIN["4:4:4"].replace(b"\xff\xc0", b"\xff\x00\x00\x02\xff\xc0"), 1)


def test_the_decoder_is_compared_with_pillow(decoder: Hardware, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fault_of(decoder) == ""
    monkeypatch.setattr(Hardware, "decoded", lambda self, data, orientation: hardware.torch.zeros(333, 517, 3))
    assert "4:4:4 differs from Pillow by up to 255" in fault_of(decoder)


@pytest.mark.parametrize(
    ("flags", "place", "reason"),
    [
        ({"decode": "cpu"}, Place.CPU, NotOnDevice.ASKED),
        ({}, Place.CPU, NotOnDevice.NO_DEVICE),
        ({"decode": "device", "decode_processes": "0"}, Place.CPU, NotOnDevice.NO_DEVICE),
        ({"decode": "device"}, Place.DEVICE, None),
        ({"device": "cuda:0"}, Place.CPU, NotOnDevice.UNVERIFIED),
    ],
)
async def test_where_files_are_decoded(flags: dict[str, str], place: Place, reason: NotOnDevice | None) -> None:
    found = await decoded_on(
        ServeSettings(model="a model", **{"device": "cpu"} | flags), decoders.HARDWARE, "JPEG files"
    )
    assert (found.place, found.reason) == (place, reason), found.detail
    assert found.detail or reason is not NotOnDevice.UNVERIFIED


# -- in a pool ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "_LEAST_PIXELS", 1)


@asynccontextmanager
async def pool_of(device: str = "cpu", **sizes: Any) -> AsyncIterator[DecodePool]:
    usual = {"input_bytes": 8 << 20, "output_bytes": 8 << 20, "pixels": 1 << 24, "seconds": 5.0}
    bounds = Sizes(**usual | {"memory": 2 << 30} | sizes)
    pool = DecodePool(1, Counts(), device, [decoders.HARDWARE])
    try:
        pool.set_up(Setup(dict(RECIPES), bounds, clips=False), [decoders.HARDWARE])
        await ready(pool)
        yield pool
    finally:
        await pool.close()


pool = entered_async(pool_of)


class Counts:
    """Nobody looks at them here."""

    def decoders(self, count: int, busy: int) -> None: ...

    def waiting(self, count: int) -> None: ...


async def decoded(pool: DecodePool, data: bytes, areas: Areas | None = None) -> Prepared:
    found = await pool.measure(FLOW, data, Modality.IMAGE, areas)

    async def reserve() -> memoryview:
        return np.zeros(int(np.prod(found.pixels)), np.uint8).data

    return await pool.decode(FLOW, data, Modality.IMAGE, found, reserve, areas=areas)


def assert_pixels(done: Prepared, data: bytes, areas: Areas | None = None) -> None:
    recipe = RECIPES[Modality.IMAGE].within(areas)
    expected = pillow.image(pillow.read(BytesIO(data), recipe, ("JPEG",)), recipe)
    np.testing.assert_array_equal(np.frombuffer(done.pixels, np.uint8), expected.pixels.reshape(-1))


async def ready(pool: DecodePool) -> None:
    assert pool._devices[decoders.HARDWARE]
    while not any(child.is_alive for child in pool._devices[decoders.HARDWARE]._all):  # noqa: ASYNC110  # nobody else waits for it
        await asyncio.sleep(0.05)


def child_of(pool: DecodePool) -> Decoder:
    """The decoder on the device, which is ready."""
    assert pool._devices[decoders.HARDWARE]
    (child,) = pool._devices[decoders.HARDWARE]._all
    return child


async def test_plain_files_go_to_the_device(pool: DecodePool) -> None:
    for data in PLAIN.values():
        done = await decoded(pool, data)
        assert done.on_device
        assert_pixels(done, data)
    done = await decoded(pool, OTHERS["progressive"])
    assert not done.on_device
    assert_pixels(done, OTHERS["progressive"])
    with pytest.raises(NotDone):
        await decoded(pool, OTHERS["cut"])


async def test_options_of_a_file_reach_either_decoder(pool: DecodePool) -> None:
    for name, on_device in (("4:2:0", True), ("progressive", False)):
        data, sizes = (PLAIN | OTHERS)[name], set[int]()
        for areas in (None, (1, 64 * 64), (200 * 200, 300 * 300)):
            done = await decoded(pool, data, areas)
            assert done.on_device is on_device
            assert_pixels(done, data, areas)
            sizes.add(len(done.pixels))
        assert len(sizes) == 3


async def test_the_decoder_sees_the_devices_that_the_server_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same order: else its index is that of another device."""
    own = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "TMPDIR": gettempdir(), "VITWIRE_TOKEN": "a secret"}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    async with pool_of() as pool:
        seen = variables(child_of(pool).process.pid)
    assert [f"{name}={value}" in seen for name, value in own.items()] == [True, True, False]


def variables(pid: int) -> list[str]:
    """Of a process, each `NAME=VALUE`."""
    return Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")


async def test_small_files_go_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "_LEAST_PIXELS", 90 * 130 + 1)
    async with pool_of() as pool:
        assert not (await decoded(pool, PLAIN["4:2:0"])).on_device
        assert (await decoded(pool, jpeg(drawn(91, 130)))).on_device


async def test_many_at_a_time_take_turns(pool: DecodePool) -> None:
    names = list(PLAIN) * 3
    for name, done in zip(names, await asyncio.gather(*(decoded(pool, PLAIN[name]) for name in names)), strict=True):
        assert done.on_device
        assert_pixels(done, PLAIN[name])


async def test_a_damaged_file_is_what_pillow_makes_of_it(pool: DecodePool) -> None:
    """Its codes end early, although it has an end."""
    data = PLAIN["4:4:4"]
    cut = data[: len(data) // 2] + b"\xff\xd9"
    try:
        done = await decoded(pool, cut)
    except NotDone as error:
        assert error.fault is Fault.MALFORMED
    else:
        assert_pixels(done, cut)
    assert (await decoded(pool, data)).on_device


async def test_a_decoder_that_dies_costs_no_file(pool: DecodePool) -> None:
    child = child_of(pool)
    os.kill(child.process.pid, signal.SIGSTOP)
    job = asyncio.create_task(decoded(pool, PLAIN["4:2:2"]))
    await asyncio.sleep(0.2)
    os.kill(child.process.pid, signal.SIGKILL)
    done = await job
    assert not done.on_device
    assert_pixels(done, PLAIN["4:2:2"])
    await ready(pool)
    assert child_of(pool) is not child
    assert (await decoded(pool, PLAIN["4:2:2"])).on_device


async def test_files_that_wait_hold_no_memory(pool: DecodePool) -> None:
    """As for other decoders: pixels are reserved when it is a file's turn."""
    os.kill(child_of(pool).process.pid, signal.SIGSTOP)
    found = await pool.measure(FLOW, PLAIN["grey"], Modality.IMAGE)
    reserved = 0

    async def reserve() -> memoryview:
        nonlocal reserved
        reserved += 1
        return np.zeros(int(np.prod(found.pixels)), np.uint8).data

    jobs = [asyncio.create_task(pool.decode(FLOW, PLAIN["grey"], Modality.IMAGE, found, reserve)) for _ in range(3)]
    while not child_of(pool).is_busy:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert reserved == 1
    os.kill(child_of(pool).process.pid, signal.SIGKILL)
    for job in jobs:
        assert_pixels(await job, PLAIN["grey"])
    assert reserved == 3


async def test_a_cancelled_file_does_not_reach_the_next(pool: DecodePool) -> None:
    for _ in range(10):
        job = asyncio.create_task(decoded(pool, PLAIN["grey"]))
        await asyncio.sleep(0.01)
        job.cancel()
        done = await decoded(pool, PLAIN["odd sides"])
        assert done.on_device
        assert_pixels(done, PLAIN["odd sides"])


async def test_a_start_that_fails_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decoders, "_FIRST_PAUSE", 0.0)
    monkeypatch.setattr(decoders, "_LONGEST_PAUSE", 0.1)
    async with pool_of() as pool:
        await decoded(pool, OTHERS["progressive"])  # starts a decoder for the rest
        await ready(pool)
        with monkeypatch.context() as missing:
            missing.setattr(sys, "executable", "/no/python")
            os.kill(child_of(pool).process.pid, signal.SIGKILL)
            assert not (await decoded(pool, PLAIN["grey"])).on_device
            while "did not start" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await ready(pool)
        assert (await decoded(pool, PLAIN["grey"])).on_device


async def test_a_decoder_that_died_leaves_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a collection, which comes late in a large process."""
    monkeypatch.setattr(decoders, "_FIRST_PAUSE", 0.0)
    async with pool_of() as pool:
        await decoded(pool, PLAIN["grey"])
        await ready(pool)
        before = shared_memories()
        gc.disable()
        try:
            os.kill(child_of(pool).process.pid, signal.SIGKILL)
            assert not (await decoded(pool, PLAIN["grey"])).on_device
            await ready(pool)
            assert shared_memories() == before
        finally:
            gc.enable()


def shared_memories() -> int:
    """Descriptors of memory that is shared with decoders."""
    links = (each for each in Path("/proc/self/fd").iterdir() if each.is_symlink())
    return sum("vitwire-decoder" in str(each.resolve()) for each in links)


async def test_a_closed_pool_starts_no_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of one that worked when it was closed."""
    monkeypatch.setattr(decoders, "_FIRST_PAUSE", 0.0)
    async with pool_of() as pool:
        os.kill(child_of(pool).process.pid, signal.SIGSTOP)
        jobs = [asyncio.create_task(decoded(pool, PLAIN["grey"])) for _ in range(3)]
        while not child_of(pool).is_busy:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    ends = await asyncio.gather(*jobs, return_exceptions=True)
    assert [getattr(end, "fault", end) for end in ends] == [Fault.LOST] * 3
    assert pool._devices[decoders.HARDWARE]
    await asyncio.gather(*pool._devices[decoders.HARDWARE]._returning)
    assert not pool._devices[decoders.HARDWARE]._all
