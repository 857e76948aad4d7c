"""Decoders: real processes, whose pixels are those that are prepared here."""

import asyncio
import select
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from io import BytesIO
from typing import Any, cast

import numpy as np
import psutil
import pytest
from PIL import Image

from encoded_files import (
    FURTHER,
    HOSTILE,
    ODD,
    bomb,
    chunk,
    clip,
    cut,
    frames_of,
    many_chunks,
    many_scans,
    moving,
    never_shown,
    photograph,
    saved,
    sound,
    tiff,
)
from entered import entered_async
from prepared import FORMATS, MODELS, SAMPLING, Recipes
from vitwire_children.serving import Fault, NotDone
from vitwire_server.core.items import Modality
from vitwire_server.preparing import pillow
from vitwire_server.preparing.files import clips
from vitwire_server.preparing.files.decoders import HARDWARE, Decoder
from vitwire_server.preparing.files.messages import Measured, Setup, Sizes
from vitwire_server.preparing.files.pool import DecodePool
from vitwire_server.preparing.pillow import Tiles
from vitwire_server.preparing.rules.forms import form_of
from vitwire_server.preparing.rules.sampling import sampled

FLOW = (0, "a caller")
LONG = Measured((1, 1, 1), (1,), None, cost=1 << 26)
_END = chunk(b"IEND", b"")
CUT = {
    "closed": ("mp4", "libx264", {"g": "20", "bf": "2"}),
    "open": ("mp4", "libx264", {"g": "20", "bf": "2", "x264-params": "open-gop=1"}),
    "intra refresh": ("mp4", "libx264", {"x264-params": "intra-refresh=1:keyint=20"}),
    "mpeg4": ("mp4", "mpeg4", {"g": "20"}),
    "broadcast": ("mpegts", "mpeg2video", {"g": "20", "bf": "2"}),
}
"""Formats, codecs and options of clips that lose their first keyframe."""
SIZES = [(300, 400), (57, 55), (20, 90), (8, 500), (400, 21), (5, 5)]


class Counts:
    """What the pool reported."""

    def __init__(self) -> None:
        self.running: list[tuple[int, int]] = []

    def decoders(self, count: int, busy: int) -> None:
        self.running.append((count, busy))

    def waiting(self, count: int) -> None:
        pass


@asynccontextmanager
async def pool_of(recipes: Recipes = MODELS["patches"], processes: int = 1, **sizes: Any) -> AsyncIterator[DecodePool]:
    usual = Sizes(input_bytes=8 << 20, output_bytes=64 << 20, pixels=1 << 24, seconds=5.0, memory=2 << 30)
    bounds = Sizes(**{name: sizes.get(name, getattr(usual, name)) for name in Sizes.__struct_fields__})
    pool = DecodePool(processes, Counts())
    try:
        pool.set_up(Setup(dict(recipes), bounds, clips=True), [])
        await pool.ready()
        yield pool
    finally:
        await pool.close()
    assert not decoders()


def decoders() -> list[psutil.Process]:
    """Those of this process that have not ended."""
    return [child for child in psutil.Process().children() if "vitwire_server.preparing" in _command(child)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # or ended, as an orphan of another test's server may have
        return ""


async def prepared(pool: DecodePool, file: bytes, modality: Modality = Modality.IMAGE) -> tuple[Measured, np.ndarray]:
    found = await pool.measure(FLOW, file, modality)
    count = int(np.prod(found.pixels)) + (int(np.prod(found.crops)) if found.crops else 0)
    return found, np.asarray(await decoded(pool, file, count, found, modality))


async def decoded(
    pool: DecodePool, file: bytes, nbytes: int, found: Measured = LONG, modality: Modality = Modality.IMAGE
) -> memoryview:
    async def reserve() -> memoryview:
        return np.zeros(nbytes, np.uint8).data

    return (await pool.decode(FLOW, file, modality, found, reserve)).pixels


def expected(file: bytes, recipes: Recipes) -> Tiles:
    with BytesIO(file) as opened:
        image = pillow.read(opened, recipes[Modality.IMAGE], FORMATS)
    return pillow.image(image, recipes[Modality.IMAGE])


def assert_equal(found: Measured, pixels: np.ndarray, tiles: Tiles) -> None:
    parts = [part for part in (tiles.pixels, tiles.crops) if part is not None]
    assert found.grid == tiles.grid
    assert found.pixels == tiles.pixels.shape
    assert found.crops == (None if tiles.crops is None else tiles.crops.shape)
    assert np.array_equal(pixels, np.concatenate([part.reshape(-1) for part in parts]))


async def assert_works(pool: DecodePool) -> None:
    photo = saved(photograph())
    assert_equal(*await prepared(pool, photo), expected(photo, MODELS["patches"]))


async def started(pool: DecodePool, job: asyncio.Task[Any]) -> Decoder:
    """A decoder that is busy: with the job, unless there are others."""
    while not (busy := [child for child in pool._decoders._all if child.is_busy]):
        assert not job.done(), job
        await asyncio.sleep(0)
    return busy[0]


async def starting() -> psutil.Process:
    """The only decoder, as soon as its process runs."""
    while not (found := decoders()):  # noqa: ASYNC110 - a process has no event
        await asyncio.sleep(0.01)
    (child,) = found
    return child


pool = entered_async(pool_of)


@pytest.mark.parametrize(("name", "modality"), [
    *((name, Modality.IMAGE) for name in MODELS), ("patches", Modality.VIDEO), ("ratio", Modality.VIDEO),
])  # fmt: skip
def test_the_form_of_an_item_is_known_from_its_shape(name: str, modality: Modality) -> None:
    own = MODELS[name][modality]
    clips = [(frames, *size) for size in SIZES[:2] for frames in (2, 5, 8)]
    for size in SIZES if modality is Modality.IMAGE else clips:
        try:
            form = form_of((*size, 3), own)
        except ValueError as error:
            assert modality is Modality.IMAGE
            with pytest.raises(ValueError, match=str(error)):
                pillow.prepared(np.zeros((*size, 3), np.uint8), own)
            continue
        tiles = pillow.prepared(np.zeros((*size, 3), np.uint8), own)
        assert form == (tiles.grid, tiles.pixels.shape, None if tiles.crops is None else tiles.crops.shape)


@pytest.mark.parametrize("name", ["patches", "raster", "square"])
async def test_files_are_prepared_as_in_this_process(name: str) -> None:
    photo = photograph()
    files = [*(saved(photo, each) for each in ("JPEG", "PNG", "WEBP")), *(make() for make in (ODD | FURTHER).values())]
    async with pool_of(MODELS[name]) as pool:
        for file in files if name == "patches" else files[:3]:
            assert_equal(*await prepared(pool, file), expected(file, MODELS[name]))


async def test_hostile_files_are_refused_and_the_decoder_survives() -> None:
    async with pool_of(pixels=64_000_000) as pool:
        before = decoders()
        for name, (make, fault, reason) in HOSTILE.items():
            with pytest.raises(NotDone) as error:
                await prepared(pool, make())
            assert not fault or error.value.fault == fault, name
            assert reason in str(error.value), name
        await assert_works(pool)
        assert decoders() == before


async def test_a_file_that_takes_too_long_ends_only_its_decoder() -> None:
    file = many_scans()
    async with pool_of(seconds=0.5, pixels=1 << 25) as pool:
        found = await pool.measure(FLOW, file, Modality.IMAGE)
        with pytest.raises(NotDone, match=r"takes more than 0\.5 s") as error:
            await decoded(pool, file, int(np.prod(found.pixels)))
        assert error.value.fault is Fault.TOO_SLOW
        with pytest.raises(NotDone, match="takes more than 1 s"):
            await pool.measure(FLOW, tiff(32, 1_900_000, 1_900_000), Modality.IMAGE)
        await assert_works(pool)


@pytest.mark.parametrize(("make", "input_bytes", "seconds"), [
    pytest.param(partial(many_scans, 500, 20_000), 8 << 20, r"1\.1\d", id="a small file"),
    pytest.param(partial(many_chunks, 2_000_000), 32 << 20, "1", id="a header"),
])  # fmt: skip
async def test_a_small_file_or_a_header_may_take_less(
    make: Callable[[], bytes], input_bytes: int, seconds: str
) -> None:
    """Than a large file; the time for a header does not grow with the file."""
    async with pool_of(seconds=60.0, input_bytes=input_bytes) as pool:
        with pytest.raises(NotDone, match=f"takes more than {seconds} s") as error:
            await prepared(pool, make())
        assert error.value.fault is Fault.TOO_SLOW
        await assert_works(pool)


async def test_headers_are_read_while_all_decoders_are_busy() -> None:
    file, slow = saved(photograph()), many_scans()
    async with pool_of(seconds=60.0, pixels=1 << 25) as pool:
        job = asyncio.create_task(decoded(pool, slow, 1))
        await started(pool, job)
        for _ in range(5):
            await pool.measure(FLOW, file, Modality.IMAGE)
        assert not job.done()
        for child in decoders():
            child.kill()
        with pytest.raises(NotDone):
            await job


async def test_clips_of_one_caller_do_not_hold_up_others() -> None:
    """Each is decoded for seconds in search of its first frame."""
    slow, flood = never_shown(6000, 20_000_000), (0, "a flood")
    async with pool_of(processes=2, seconds=60.0, input_bytes=32 << 20) as pool:
        jobs = [asyncio.create_task(pool.measure(flood, slow, Modality.VIDEO)) for _ in range(4)]
        await started(pool, jobs[0])
        await assert_works(pool)
        await prepared(pool, clip(moving(12)), Modality.VIDEO)
        assert not any(job.done() for job in jobs)
        for job in jobs:
            job.cancel()
        killed()
        await asyncio.gather(*jobs, return_exceptions=True)


async def test_a_decoder_that_hangs_over_a_header_holds_up_nobody_else(pool: DecodePool) -> None:
    file = saved(photograph())
    hanging = psutil.Process(pool._decoders._idle[-1].process.pid)
    hanging.suspend()
    job = asyncio.create_task(pool.measure((0, "another"), file, Modality.IMAGE))
    await started(pool, job)
    for _ in range(3):
        await assert_works(pool)
    assert not job.done()
    hanging.resume()
    await job


async def test_pixels_are_not_decoded_for_metadata_behind_them(pool: DecodePool) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    whole = bomb(4000, 2000)
    late = whole[: -len(_END)] + chunk(b"eXIf", exif.tobytes()[6:]) + _END
    found, turned = [await pool.measure(FLOW, file, Modality.IMAGE) for file in (whole, late)]
    assert turned.grid == (found.grid[0], found.grid[2], found.grid[1])
    with pytest.raises(NotDone, match="truncated"):
        await decoded(pool, late, 1)


async def test_memory_is_limited() -> None:
    large = saved(photograph(5000, 5000))
    async with pool_of(memory=120 << 20, output_bytes=1 << 20, pixels=1 << 25) as pool:
        with pytest.raises(NotDone) as error:
            await prepared(pool, large)
        assert error.value.fault is Fault.TOO_LARGE
        await assert_works(pool)


async def test_a_killed_decoder_costs_at_most_its_file() -> None:
    file, slow = saved(photograph()), many_scans()
    async with pool_of(seconds=60.0, pixels=1 << 25) as pool:
        job = asyncio.create_task(decoded(pool, slow, 1))
        child = psutil.Process((await started(pool, job)).process.pid)
        while child.cpu_times().user < 1.0:  # noqa: ASYNC110 - until it works on the job
            await asyncio.sleep(0.02)
        child.kill()
        with pytest.raises(NotDone, match="ended unexpectedly") as error:
            await job
        assert error.value.fault is Fault.LOST
        await prepared(pool, file)
        killed()  # while they are idle
        await prepared(pool, file)


def killed() -> None:
    """Kill all decoders."""
    found = decoders()
    for child in found:
        child.kill()
    psutil.wait_procs(found, 1)


async def test_a_cancelled_job_keeps_its_decoder() -> None:
    file, slow = saved(photograph()), many_scans(1000, 500)
    async with pool_of(seconds=60.0) as pool:
        await prepared(pool, file)
        before = {child.pid for child in decoders()}
        found = await pool.measure(FLOW, slow, Modality.IMAGE)
        job = asyncio.create_task(decoded(pool, slow, int(np.prod(found.pixels))))
        await started(pool, job)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        await assert_works(pool)
        assert before <= {child.pid for child in decoders()}, "another may have read the header meanwhile"


async def test_a_job_that_is_cancelled_as_its_answer_arrives_costs_nothing() -> None:
    file = saved(photograph())
    async with pool_of(seconds=60.0) as pool, asyncio.timeout(60):
        await prepared(pool, file)
        before = set(pool._decoders._all)
        for steps in range(8):
            job = asyncio.create_task(pool.measure(FLOW, file, Modality.IMAGE))
            child = await started(pool, job)
            await asyncio.sleep(0)
            select.select([child._link], [], [], 0.5)  # of 5 ms that a header takes
            for _ in range(steps):
                await asyncio.sleep(0)
            job.cancel()
            with suppress(asyncio.CancelledError):
                await job
            await asyncio.gather(*pool._decoders._returning)
        await assert_works(pool)
        assert pool._decoders._all == before


async def test_a_cancelled_job_does_not_stop_the_start_of_a_decoder(pool: DecodePool) -> None:
    file = saved(photograph())
    killed()
    job = asyncio.create_task(pool.measure(FLOW, file, Modality.IMAGE))
    child = await starting()
    job.cancel()
    await prepared(pool, file)
    await asyncio.gather(*pool._decoders._returning)
    assert child.pid in {each.process.pid for each in pool._decoders._all}
    assert len(pool._decoders._all) <= 2, "another header was read meanwhile"


async def test_closing_ends_a_decoder_that_starts(pool: DecodePool) -> None:
    killed()
    job = asyncio.create_task(pool.measure(FLOW, b"", Modality.IMAGE))
    await starting()
    job.cancel()
    with suppress(asyncio.CancelledError):
        await job


async def test_closing_ends_decoders_that_await_their_setup() -> None:
    pool = DecodePool(2, Counts(), "cpu", [HARDWARE])
    while len(decoders()) < 4:  # noqa: ASYNC110 - until their processes run
        await asyncio.sleep(0.01)
    await pool.close()
    assert not decoders()


async def test_decoders_are_ready_before_the_first_job() -> None:
    files = [saved(photograph(200 + side, 300)) for side in range(6)]
    async with pool_of(processes=2) as pool:
        counts, ready = cast("Counts", pool._monitor).running, decoders()
        assert len(ready) == 3, "one more, as headers are read meanwhile"
        for file, result in zip(files, await asyncio.gather(*(prepared(pool, file) for file in files)), strict=True):
            assert_equal(*result, expected(file, MODELS["patches"]))
        assert decoders() == ready
        await asyncio.gather(*pool._decoders._returning)
        assert max(busy for _, busy in counts) >= 2
        assert all(0 <= busy <= count for count, busy in counts)
        assert counts[-1] == (len(decoders()), 0)


@pytest.mark.parametrize("made", CUT.values(), ids=CUT)
async def test_clips_that_start_between_keyframes(made: tuple[str, str, dict[str, str]], pool: DecodePool) -> None:
    file = cut(clip(moving(60), codec=made[1], options=made[2]), 7, made[0])
    shown = len(frames_of(file, range(60)))
    assert shown < 60
    await assert_sampled(pool, file, shown, 10.0)


async def assert_sampled(pool: DecodePool, file: bytes, frames: int, rate: float, name: str = "patches") -> None:
    own = MODELS[name][Modality.VIDEO]
    indices = sampled(frames, rate, SAMPLING, own.temporal)
    found, pixels = await prepared(pool, file, Modality.VIDEO)
    assert found.frame_seconds == tuple(index / rate for index in indices)
    assert_equal(found, pixels, pillow.prepared(np.stack(frames_of(file, indices)), own))


@pytest.mark.parametrize(("name", "kind", "codec"), [
    ("patches", "mp4", "libx264"), ("ratio", "webm", "libvpx-vp9"), ("patches", "avi", "mpeg4"),
    ("patches", "avi", "mjpeg"), ("patches", "mpegts", "libx264"), ("patches", "mpegts", "mpeg2video"),
    ("patches", "mp4", "libx265"), ("patches", "mp4", "mpeg4"), ("ratio", "webm", "libsvtav1"),
])  # fmt: skip
async def test_clips_are_sampled_and_prepared(name: str, kind: str, codec: str) -> None:
    file = clip(moving(45), 15.0, kind, codec, {"strict": "-1"})
    async with pool_of(MODELS[name]) as pool:
        await assert_sampled(pool, file, 45, 15.0, name)


@pytest.mark.parametrize(("codec", "options", "skips"), [
    ("libx264", {"bf": "3", "b_strategy": "0"}, True),
    ("libx265", {"x265-params": "bframes=3:b-adapt=0:log-level=none"}, True),
    ("libx265", {"x265-params": "bframes=3:b-adapt=0:temporal-layers=3:log-level=none"}, False),
])  # fmt: skip
def test_frames_that_no_chosen_one_needs_are_not_decoded(codec: str, options: dict[str, str], skips: bool) -> None:
    """Where it is sure: in HEVC with layers, a frame that is not a reference in its layer may be one in a higher."""
    file = clip(moving(45), codec=codec, options=options)
    with clips.opened(file) as (container, stream):
        times = clips._shown(file, container, stream).times
    with clips.opened(file) as (container, stream):
        chosen = {times[0], times[7]} if times else set()
        decoded = [frame.pts for frame in clips.needed(container, stream, chosen)]
    assert chosen <= set(decoded)
    assert (len(decoded) < 30, bool(times)) == (skips, skips)


async def test_hostile_clips_are_refused(pool: DecodePool) -> None:
    good = clip(moving(12))
    damaged = bytearray(good)
    damaged[len(good) // 3 : len(good) * 2 // 3] = bytes(len(good) * 2 // 3 - len(good) // 3)
    files = {
        "is neither an MP4, WebM, AVI nor MPEG-TS file": saved(photograph()),
        "has no video": sound(),
        "has no frame": clip(moving(2), kind="mpegts")[: 3 * 188],
        r"without an index \(moov\)": good[: len(good) // 2],
        "cannot be decoded": good[: len(good) // 2] + b"moov",
    }
    for reason, file in files.items():
        with pytest.raises(NotDone, match=reason) as error:
            await prepared(pool, file, Modality.VIDEO)
        assert error.value.fault in (Fault.UNSUPPORTED, Fault.MALFORMED)
    with pytest.raises(NotDone, match="is not a JPEG"):
        await prepared(pool, good)
    with suppress(NotDone):  # FFmpeg conceals some damage
        await prepared(pool, bytes(damaged), Modality.VIDEO)
    await prepared(pool, good, Modality.VIDEO)


@pytest.mark.parametrize("name", MODELS)
async def test_pictures_are_prepared_as_in_this_process(name: str) -> None:
    """With 3 and 4 channels, to pixels and to RGB."""
    own, photo = MODELS[name][Modality.IMAGE], np.asarray(photograph(150, 210))
    clear = np.dstack([photo, np.arange(150 * 210, dtype=np.uint16).reshape(150, 210).astype(np.uint8)])
    async with pool_of(MODELS[name]) as pool:
        for picture in (photo, clear):
            found = pool.measure_picture(picture.shape, Modality.IMAGE)
            assert found.picture == photo.shape
            assert_equal(found, await pixels_of(pool, picture, found), pillow.prepared(picture, own))
            rgb = await pixels_of(pool, picture, found, raw=True)
            assert np.array_equal(rgb.reshape(photo.shape), pillow.flattened(picture, own))


@pytest.mark.parametrize("name", ["patches", "ratio"])
async def test_frames_are_prepared_as_in_this_process(name: str) -> None:
    own = MODELS[name][Modality.VIDEO]
    frames = np.stack([np.asarray(photograph(60, 90))[:, ::sign] for sign in (1, -1, 1)])
    async with pool_of(MODELS[name]) as pool:
        found = pool.measure_picture(frames.shape, Modality.VIDEO)
        assert form_of(frames.shape, own).grid == found.grid
        made = await pixels_of(pool, frames, found, Modality.VIDEO)
        assert_equal(found, made, pillow.prepared(frames, own))


async def test_a_picture_that_the_rule_refuses(pool: DecodePool) -> None:
    with pytest.raises(NotDone, match="too elongated") as error:
        pool.measure_picture((1, 500, 3), Modality.IMAGE)
    assert error.value.fault is Fault.UNSUPPORTED


async def pixels_of(
    pool: DecodePool, picture: np.ndarray, found: Measured, modality: Modality = Modality.IMAGE, *, raw: bool = False
) -> np.ndarray:
    parts = [found.picture] if raw else [part for part in (found.pixels, found.crops) if part]

    async def reserve() -> memoryview:
        return np.zeros(sum(int(np.prod(part)) for part in parts), np.uint8).data

    done = await pool.decode(FLOW, picture.tobytes(), modality, found, reserve, picture.shape, raw=raw)
    return np.asarray(done.pixels)
