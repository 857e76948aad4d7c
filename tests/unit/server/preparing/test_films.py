"""Clips on a device: the CPU stands in for NVDEC in a real process, and frames are those of the decoders on the CPU."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from encoded_files import clip, coded_otherwise, frames_of, moving
from prepared import MODELS
from vitwire_server.core.items import Modality
from vitwire_server.preparing import pillow
from vitwire_server.preparing.device import films, units
from vitwire_server.preparing.device.sources import Coded
from vitwire_server.preparing.files import clips
from vitwire_server.preparing.files.decoders import FILMS
from vitwire_server.preparing.files.messages import Measured, Setup, Sizes
from vitwire_server.preparing.files.pool import DecodePool, Prepared
from vitwire_server.preparing.rules.sampling import sampled

RECIPE = MODELS["patches"][Modality.VIDEO]
PIXELS = 1 << 24
FLOW = (0, "caller", 0, 0)
X264 = {"bf": "3", "g": "9"}
TURNED = (0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30)
TAKEN: dict[str, dict[str, Any]] = {
    "h264": {"options": X264},
    "h264 with open groups": {"options": {"x264-params": "open-gop=1:keyint=9:bframes=3"}},
    "h264, full range, BT.709": {"options": {"x264-params": "colormatrix=bt709:fullrange=on"}},
    "h264, BT.2020": {"options": {"x264-params": "colormatrix=bt2020nc"}},
    "h264, turned": {"options": X264, "matrix": TURNED},
    "hevc": {"codec": "libx265", "options": {"x265-params": "log-level=none"}},
    "matroska": {"kind": "matroska", "options": X264},
}
LEFT: dict[str, dict[str, Any]] = {
    "interlaced": {"options": {"x264-params": "interlaced=1"}},
    "vp9": {"kind": "webm", "codec": "libvpx-vp9", "options": {"deadline": "realtime", "cpu-used": "8"}},
    "another codec": {"codec": "mpeg4"},
    "without times": {"kind": "avi", "codec": "mpeg4"},
    "of a broadcast": {"kind": "mpegts"},
}


class Counts:
    """Nobody looks at them here."""

    def decoders(self, count: int, busy: int) -> None: ...

    def waiting(self, count: int) -> None: ...


@asynccontextmanager
async def pool() -> AsyncIterator[DecodePool]:
    made = DecodePool(1, Counts(), "cpu", [FILMS])
    try:
        sizes = Sizes(input_bytes=32 << 20, output_bytes=8 << 20, pixels=PIXELS, seconds=10.0, memory=2 << 30)
        made.set_up(Setup(dict(MODELS["patches"]), sizes, clips=True), [FILMS])
        await made.ready()
        yield made
    finally:
        await made.close()


async def decoded(pool: DecodePool, data: bytes) -> Prepared:
    found = await pool.measure(FLOW, data, Modality.VIDEO)
    return await pool.decode(FLOW, data, Modality.VIDEO, found, lambda: memory(found))


async def memory(found: Measured) -> memoryview:
    return np.zeros(int(np.prod(found.pixels)), np.uint8).data


def made_of(data: bytes) -> torch.Tensor:
    film = clips.measure(data, RECIPE, PIXELS).film
    assert film
    return films.frames_of(data, film, films.OnCpu(), torch.device("cpu"))


def unit(content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + content


def expected(data: bytes, count: int = 40) -> np.ndarray[Any, Any]:
    indices = sampled(count, 10.0, RECIPE.settings.sampling, RECIPE.temporal)
    return pillow.prepared(np.stack(frames_of(data, indices)), RECIPE).pixels.reshape(-1)


@pytest.mark.parametrize("name", TAKEN)
def test_frames_are_those_of_the_cpu(name: str) -> None:
    data = clip(moving(40, 98, 130), **TAKEN[name])
    with clips.decoded(data, RECIPE, PIXELS) as (frames, _):
        wanted = np.stack(list(frames))
    np.testing.assert_array_equal(made_of(data).numpy(), wanted)


def test_what_may_be_opened_before_jobs_and_during_them(tmp_path: Path) -> None:
    """Triton moves files from one folder of its cache to another; NVDEC opens the device at any time."""
    program = """
import sys
from pathlib import Path
from vitwire_server.preparing.device import films
films._DEVICES[:] = ["/dev/zero"]
cache, device = Path(sys.argv[1]), Path("/dev/zero")
films._bind(str(cache))
(cache / "new").mkdir()
(cache / "new" / "kernel").write_text("made")
print((cache / "new" / "kernel").replace(cache / "kernel").read_text())
films._bind()
for path in (device, cache / "kernel", Path("/etc/passwd")):
    try:
        path.open("rb").close()
        print("opened")
    except PermissionError:
        print("refused")
"""
    ran = subprocess.run([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=True)
    assert ran.stdout.split() == ["made", "opened", "refused", "refused"]


async def test_a_process_takes_what_it_can_and_leaves_the_rest() -> None:
    async with pool() as own:
        for settings in (TAKEN["h264"], TAKEN["matroska"], *LEFT.values()):
            data = clip(moving(40), **settings)
            done = await decoded(own, data)
            np.testing.assert_array_equal(np.frombuffer(done.pixels, np.uint8), expected(data))
            assert done.on_device == (settings in TAKEN.values()), settings


async def test_a_killed_process_costs_nothing() -> None:
    data = clip(moving(40), options=X264)
    async with pool() as own:
        (child,) = own._devices[FILMS]._all
        os.kill(child.process.pid, signal.SIGSTOP)
        job = asyncio.create_task(decoded(own, data))
        await asyncio.sleep(0.5)
        os.kill(child.process.pid, signal.SIGKILL)
        done = await job
        np.testing.assert_array_equal(np.frombuffer(done.pixels, np.uint8), expected(data))
        assert not done.on_device


@pytest.mark.parametrize("times", [(), (0, 0, 0, 0)])
async def test_a_decoder_that_lies_ends_no_process(times: tuple[int, ...]) -> None:
    data = clip(moving(40), options=X264)
    async with pool() as own:
        found = await own.measure(FLOW, data, Modality.VIDEO)
        assert found.film
        lie = replace(found, cost=-(10**30), film=replace(found.film, times=times))
        done = await own.decode(FLOW, data, Modality.VIDEO, lie, lambda: memory(found))
        np.testing.assert_array_equal(np.frombuffer(done.pixels, np.uint8), expected(data))
        assert own._devices[FILMS].takes(found)
        assert not done.on_device


async def test_a_frame_of_a_million_parts_does_not_end_the_process() -> None:
    """PyAV alone takes a second to open it, which is the time for the pixels of such a clip."""
    with av.open(BytesIO(clip(moving(9), options=X264))) as source, BytesIO() as file:
        with av.open(file, "w", "mp4") as container:
            stream = container.add_stream_from_template(source.streams.video[0])
            for number, packet in enumerate(source.demux(video=0)):
                if packet.size:
                    made = av.Packet(bytes(packet) + unit(b"\x0c") * (6_000_000 if number == 0 else 0))
                    made.stream, made.time_base, made.is_keyframe = stream, packet.time_base, packet.is_keyframe
                    made.pts, made.dts = packet.pts, packet.dts
                    container.mux(made)
        data = file.getvalue()
    async with pool() as own:
        (child,) = own._devices[FILMS]._all
        with suppress(films.NotDone):  # the CPU's decoder needs a second too
            await decoded(own, data)
        assert child.is_alive


@pytest.mark.parametrize("seed", range(12))
def test_damaged_clips_raise_what_is_expected(seed: int) -> None:
    rng = np.random.default_rng(seed)
    data = bytearray(clip(moving(40), **list(TAKEN.values())[seed % len(TAKEN)]))
    for at in rng.integers(0, len(data), 5):
        data[at] = rng.integers(256)
    try:
        made = made_of(bytes(data))
    except (films.NotDone, ValueError, films.av.FFmpegError):
        return
    assert made.dtype is torch.uint8


def test_only_groups_with_chosen_frames_are_decoded() -> None:
    data = clip(moving(40), options={"g": "10", "bf": "2", "sc_threshold": "0"})
    with clips.opened(data) as (container, stream):
        coded = list(films._coded(container, stream, len(data)))
        times = sorted(each.time for each in coded)
        parts = films.parts_of(coded, {times[3], times[25], times[31]}, 2)
        assert [len(part) for part in parts] == [9, 3]
        assert films.parts_of(coded, {times[12]}, 4) == [coded[10:14]]
        decoded = [samples.time for part in parts for samples in films.OnCpu().decoded(stream, part, times)]
    assert {times[3], times[25], times[31]} <= {*decoded} <= {*times[:10], *times[20:]}


def test_the_check_finds_other_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert films.fault_of(films.OnCpu(), films.drawn()) == ""
    monkeypatch.setattr(films, "rgb", lambda luma, *_: torch.zeros(*luma.shape, 3, dtype=torch.uint8))
    assert "differs from PyAV by up to" in films.fault_of(films.OnCpu(), films.drawn())


def test_a_clip_in_which_damage_was_found_is_left_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(films.OnCpu, "is_damaged", lambda _: True)
    with pytest.raises(films.NotDone, match="it is damaged"):
        made_of(clip(moving(40), options=X264))


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_a_run_begins_with_a_frame_that_refers_to_no_other(codec: str) -> None:
    """Whatever the file calls a keyframe."""
    data = clip(moving(20), codec=codec, options={"g": "20", "x265-params": "log-level=none"})
    with clips.opened(data) as (container, stream):
        name = stream.codec_context.codec.canonical_name
        coded = list(films._coded(container, stream, len(data)))
        settings = units.sequence_of(name, bytes(stream.codec_context.extradata or b""))
        bits = units.coding_of(name, settings).number_bits
    frames = [units.frame_of(name, bytes(each.packet), settings, bits) for each in coded]
    assert [each.starts for each in frames] == [True] + [False] * 19
    other = unit(b"\1\0" if name == "h264" else b"\2\1\0")  # a slice of the same frame that may refer to others
    assert not units.frame_of(name, bytes(coded[0].packet) + other, settings, bits).starts
    assert len(films.parts_of(coded, {each.time for each in coded}, 4)) == 1
    with pytest.raises(films.NotDone, match="does not start with a keyframe"):
        films.parts_of(coded[1:], {coded[5].time}, 4)


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
@pytest.mark.parametrize(("height", "width"), [(98, 130), (1080, 1920)])
def test_the_coded_size_is_read_and_no_frame_may_change_it(codec: str, height: int, width: int) -> None:
    def opened(height: int, width: int) -> tuple[str, bytes, bytes]:
        data = clip(moving(3, height, width), codec=codec, options={"x265-params": "log-level=none"})
        with clips.opened(data) as (container, stream):
            with pytest.raises(films.NotDone, match="its frames overlap"):
                list(films._coded(container, stream, 100))
            context, packet = stream.codec_context, next(container.demux(stream))
            settings = bytes(context.extradata or b"")
            return context.codec.canonical_name, settings, bytes(packet)

    name, settings, frame = opened(height, width)
    sequence = units.sequence_of(name, settings)
    coded = units.coding_of(name, sequence)
    assert (0, 0) <= (coded[0] - width, coded[1] - height) < (16, 16)
    other = units.sequence_of(name, opened(200, 300)[1])
    read = partial(units.frame_of, name, sequence=sequence, number_bits=coded.number_bits)
    assert read(unit(sequence) + frame) == read(frame)
    for hidden in (other, frame[4:] + b"\0\0\1" + other):
        with pytest.raises(films.NotDone, match="bring other settings"):
            read(frame + unit(hidden))
    after = 8 + len(sequence) if name == "h264" else len(settings)
    listed = (b"\x02" if name == "h264" else b"\xa0\0\1") + unit(other)[2:]  # as a picture's settings, or the stream's
    with pytest.raises(films.NotDone, match="has not one sequence"):
        units.sequence_of(name, settings[:after] + listed + settings[after + 1 :])
    for parts in (frame + frame, b"", frame + unit(b"\x0c") * 1000):
        with pytest.raises(films.NotDone, match=r"not one frame|too small parts"):
            read(parts)
    for broken in (settings[:7], settings[:12], settings + b"\0\0\1"):
        with pytest.raises((films.NotDone, ValueError)):
            units.coding_of(name, units.sequence_of(name, broken))


@pytest.mark.parametrize("name", [name for name in TAKEN if "h264" in name or name == "matroska"])
def test_frames_that_are_missing_are_noticed(name: str) -> None:
    """If others refer to them: NVDEC might show something in their place, and say nothing."""
    data = clip(moving(40, 98, 130), **TAKEN[name])

    def coded(missing: int = -1) -> list[Coded]:
        with clips.opened(data) as (container, stream):
            packets = [packet for packet in container.demux(stream) if packet.size]
            packets = [packet for at, packet in enumerate(packets) if at != missing]
            rest: Any = SimpleNamespace(demux=lambda _: packets)
            return list(films._coded(rest, stream, len(data)))

    whole = coded()
    for at, each in [*enumerate(whole)][1:-1]:
        if each.is_unneeded or whole[at + 1].starts:
            assert len(coded(at)) == 39
        else:
            with pytest.raises(films.NotDone, match="frames are missing"):
                coded(at)


@pytest.mark.parametrize(
    ("options", "reason"), [("crop-rect=16,0,0,0", "cropped"), ("fake-interlaced=1", "interlaced")]
)
def test_what_nvdec_would_show_otherwise_is_left_to_the_cpu(options: str, reason: str) -> None:
    with clips.opened(clip(moving(9), options={"x264-params": options})) as (_, stream):
        sequence = units.sequence_of("h264", stream.codec_context.extradata or b"")
    with pytest.raises(films.NotDone, match=reason):
        units.coding_of("h264", sequence)


def test_settings_and_times_are_those_of_the_file() -> None:
    data = clip(moving(9), options={"bf": "0", "refs": "2"})
    with pytest.raises(films.NotDone, match="bring other settings"):
        made_of(coded_otherwise(data, clip(moving(9), options={"refs": "5"})))
    ordered = bytearray(clip(moving(9), options=X264))
    film, at = clips.measure(bytes(ordered), RECIPE, PIXELS).film, ordered.index(b"ctts") + 24
    assert film
    ordered[at : at + 4] = (int.from_bytes(ordered[at : at + 4], "big") - film.times[-1] // 8).to_bytes(4, "big")
    with pytest.raises(films.NotDone, match="same time"):
        films.frames_of(bytes(ordered), film, films.OnCpu(), torch.device("cpu"))
