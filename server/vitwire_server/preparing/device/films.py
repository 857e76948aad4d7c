"""A decoder of clips on the model's device: NVDEC decodes, `colours` converts, and the kernel of `device` prepares.

It is a process with a separate context on the device, outside of MPS, as the decoder of JPEG files. PyAV takes packets
out of the file, so that frames and their times are the CPU decoders'. Groups of pictures that do not refer to each
other are decoded at the same time, each by a decoder. On a CPU PyAV decodes too, which shows that the way works.
"""

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import av
import numpy as np
import torch
from av import Packet
from av.container import InputContainer
from av.video.stream import VideoStream
from msgspec import to_builtins
from torch import Tensor

from vitwire_children.confine import May
from vitwire_children.serving import Answering, Fault, NotDone, serve
from vitwire_server.preparing.device.colours import Colours, rgb
from vitwire_server.preparing.device.hardware import DRAWN, NO_MPS, difference_of, write
from vitwire_server.preparing.device.resizing import prepared
from vitwire_server.preparing.files import clips
from vitwire_server.preparing.files.messages import Decode, Decoded, Setup
from vitwire_server.preparing.files.worker import shared_memory
from vitwire_server.preparing.rules.recipe import Recipe

_FILTERS = {"h264": "h264_mp4toannexb", "hevc": "hevc_mp4toannexb"}
"""FFmpeg's filters that bring packets into the form that NVDEC reads."""
_CODECS = {"h264": "H264", "hevc": "HEVC", "vp9": "VP9", "av1": "AV1"}
"""NVDEC's names."""
_DECODERS = 4
"""At the same time for one clip; an H100 and an H200 have seven."""
_PROBE = (130, 194)
_PROBE_FRAMES = 8


class Samples(NamedTuple):
    """A frame in NV12, on the device."""

    time: int
    luma: Tensor
    """`(H, W)` uint8."""
    chroma: Tensor
    """`(H / 2, ceil(W / 2), 2)` uint8."""


class Coded(NamedTuple):
    """A frame in a file."""

    time: int
    packet: "Packet[VideoStream]"


class Source(Protocol):
    """Decodes frames of a stream that begin with a keyframe."""

    def __call__(self, stream: VideoStream, coded: Sequence[Coded]) -> Iterator[Samples]:
        """Their samples in the order in which they are shown; each is valid until the next. Raises NotDone."""


def on_cpu(stream: VideoStream, coded: Sequence[Coded]) -> Iterator[Samples]:
    """PyAV's."""
    context: Any = av.CodecContext.create(stream.codec_context.codec, "r")
    context.extradata, context.thread_count = stream.codec_context.extradata, 1
    for packet in (*(each.packet for each in coded), None):
        for frame in context.decode(packet):
            luma, u, v = (
                np.frombuffer(plane, np.uint8).reshape(plane.height, plane.line_size)[:, : plane.width]
                for plane in frame.planes
            )
            yield Samples(frame.pts, torch.from_numpy(luma), torch.from_numpy(np.stack([u, v], -1)))


class Nvdec:
    """NVIDIA's decoders, by PyNvVideoCodec."""

    def __init__(self, device: torch.device) -> None:
        """Raises ImportError or RuntimeError."""
        import PyNvVideoCodec  # noqa: PLC0415 - it needs a driver

        self._nvc: Any = PyNvVideoCodec
        self._device = device

    def __call__(self, stream: VideoStream, coded: Sequence[Coded]) -> Iterator[Samples]:
        """As of Source."""
        name = stream.codec_context.codec.canonical_name
        decoder = self._nvc.CreateDecoder(
            gpuid=self._device.index or 0,
            codec=getattr(self._nvc.cudaVideoCodec, _CODECS[name]),
            cudacontext=0,
            cudastream=0,
            usedevicememory=1,
            maxwidth=stream.width,
            maxheight=stream.height,
        )
        annex_b = av.BitStreamFilterContext(_FILTERS[name], stream) if name in _FILTERS else None
        for each in coded:
            for packet in annex_b.filter(each.packet) if annex_b else (each.packet,):
                yield from self._decoded(decoder, bytes(packet), each.time)
        yield from self._decoded(decoder, b"", None)

    def _decoded(self, decoder: Any, data: bytes, at: int | None) -> Iterator[Samples]:  # noqa: ANN401 - no types
        array = np.frombuffer(data, np.uint8)
        given = self._nvc.PacketData()
        given.bsl, given.bsl_data = len(array), array.ctypes.data if len(array) else 0
        if at is not None:
            given.pts = at
        for frame in decoder.Decode(given):
            if frame.format != self._nvc.Pixel_Format.NV12:
                raise NotDone(Fault.LOST, f"NVDEC decodes it to {frame.format}")
            luma, chroma = (torch.as_tensor(plane, device=self._device) for plane in frame.cuda())
            yield Samples(frame.timestamp, luma[..., 0], chroma)


def _coded(container: InputContainer, stream: VideoStream) -> Iterator[Coded]:
    for packet in container.demux(stream):
        if packet.size and packet.pts is not None:
            yield Coded(packet.pts, packet)


def is_unneeded(codec: str, coded: Coded) -> bool:
    """Whether it is an H.264 frame of an MP4 that no other refers to: `nal_ref_idc` is 0 (ITU-T H.264, 7.4.1)."""
    at, packet = 0, bytes(coded.packet) if codec == "h264" else b""
    while at + 5 <= len(packet):
        length, head = int.from_bytes(packet[at : at + 4], "big"), packet[at + 4]
        if 1 <= head & 31 <= 5:
            return head >> 5 & 3 == 0
        at += 4 + length
    return False


def parts_of(coded: Sequence[Coded], chosen: Collection[int], most: int) -> list[list[Coded]]:
    """Runs of frames that can be decoded alone, with all chosen times in them; about `most`, equally long.

    A run begins with a keyframe that is shown after all frames before it, and before all behind it.
    """
    before = [-1 << 62, *accumulate((each.time for each in coded), max)]
    behind = [*accumulate((each.time for each in reversed(coded)), min)][::-1]
    starts = [at for at, each in enumerate(coded) if each.packet.is_keyframe and before[at] < each.time <= behind[at]]
    groups = [coded[start:end] for start, end in pairwise([*starts, len(coded)])]
    needed = [group for group in groups if any(each.time in chosen for each in group)]
    total, done = sum(map(len, needed)), 0
    parts: list[list[Coded]] = [[] for _ in range(most)]
    for group in needed:
        parts[done * most // total] += group
        done += len(group)
    return [part for part in parts if part]


def frames_of(data: bytes, recipe: Recipe, max_pixels: int, source: Source, device: torch.device) -> Tensor:
    """The chosen frames in RGB, upright, `(F, H, W, 3)` uint8. Raises NotDone, ValueError or PyAV's errors."""
    own = clips.chosen(data, recipe, max_pixels)
    with clips.opened(data) as (container, stream):
        colours, codec = Colours.of(stream), stream.codec_context.codec.canonical_name
        if not clips.suits_device(stream, own.shown) or not colours.is_known:
            raise NotDone(Fault.LOST, "it is not for the device")
        places = {own.shown.times[index]: at for at, index in enumerate(own.indices)}
        coded = [each for each in _coded(container, stream) if each.time in places or not is_unneeded(codec, each)]
        pictures = torch.empty((len(places), *own.size, 3), dtype=torch.uint8, device=device)

        def convert(part: Sequence[Coded]) -> int:
            last, found = max(each.time for each in part if each.time in places), 0
            for samples in source(stream, part):
                if (at := places.get(samples.time)) is not None:
                    if samples.luma.shape != (stream.height, stream.width):
                        raise NotDone(Fault.UNSUPPORTED, "its frames change their size")
                    pictures[at] = own.rotation.turned(rgb(samples.luma, samples.chroma, colours))
                    found += 1
                if samples.time == last:
                    break
            return found

        with ThreadPoolExecutor(_DECODERS) as threads:
            found = sum(threads.map(convert, parts_of(coded, places, _DECODERS)))
    if found != len(places):
        raise NotDone(Fault.LOST, "a frame was not decoded")
    return pictures


def _drawn() -> bytes:
    """A clip with smooth and noisy parts. Raises PyAV's errors without an encoder for H.264."""
    rng, (height, width) = np.random.default_rng(0), _PROBE
    whole = rng.integers(0, 256, (height // 8, (width + _PROBE_FRAMES) // 8 + 1, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    with BytesIO() as file:
        with av.open(file, "w", "mp4") as container:
            stream: Any = container.add_stream("libx264", rate=10, options={"bf": "2", "g": "4"})
            stream.height, stream.width, stream.pix_fmt = len(whole), width, "yuv420p"
            for at in range(_PROBE_FRAMES):
                picture = np.ascontiguousarray(whole[:, at : at + width])
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
            container.mux(stream.encode())
        return file.getvalue()


def fault_of(source: Source) -> str:
    """Why clips are not decoded by it; empty if a drawn clip's frames are close enough to PyAV's."""
    data = _drawn()
    with clips.opened(data) as (container, stream):
        expected = {frame.pts or 0: frame.to_ndarray(format="rgb24") for frame in container.decode(stream)}
    made = {}
    with clips.opened(data) as (container, stream):
        for samples in source(stream, list(_coded(container, stream))):
            made[samples.time] = rgb(samples.luma, samples.chroma, Colours.of(stream)).cpu().numpy()
    if made.keys() != expected.keys():
        return f"a clip of {len(expected)} frames has {len(made)}"
    differences = [np.abs(made[at].astype(np.int16) - expected[at]) for at in expected]
    return difference_of(np.stack(differences), "PyAV")


def _source(device: torch.device) -> Source:
    if device.type != "cuda":
        return on_cpu
    os.environ["CUDA_MPS_PIPE_DIRECTORY"] = NO_MPS
    torch.cuda.set_device(device)
    return Nvdec(device)


def _ahead() -> Answering:
    """Decodes and prepares a drawn clip: the first use loads libraries and kernels, which is not possible later."""
    device = torch.device(sys.argv[3])
    source = _source(device)
    fault_of(source)
    prepared(torch.zeros(2, *_PROBE, 3, dtype=torch.uint8, device=device), DRAWN)[0].cpu()
    return partial(_answering, source, device)


def _answering(source: Source, device: torch.device, setup: Setup) -> tuple[Callable[[Decode], object], None]:
    """Does jobs. Whatever is not expected ends the process, and with it all that the file left behind."""
    memory = shared_memory()

    def answer(job: Decode) -> object:
        start = time.perf_counter()
        recipe = setup.recipes[job.modality].within(job.areas).taking(job.frames)
        try:
            frames = frames_of(memory[: job.nbytes], recipe, setup.sizes.pixels, source, device)
            decoded = time.perf_counter()
            write(prepared(frames, recipe), memory, setup.sizes.input_bytes, job)
        except (ValueError, av.FFmpegError) as error:
            raise NotDone(Fault.LOST, str(error)) from error
        return to_builtins(Decoded(decoded - start, time.perf_counter() - decoded))

    return answer, None


def _check() -> Answering:
    """Its job is to say why this device cannot decode; empty if it can."""
    try:
        fault = fault_of(_source(torch.device(sys.argv[3])))
    except Exception as error:  # noqa: BLE001 - of a driver or library: the reason is the answer
        fault = f"NVDEC cannot be used: {str(error).partition(chr(10))[0]}"
    return lambda _: (lambda _: fault, None)


if __name__ == "__main__":
    serve(_check if sys.argv[2] == "check" else _ahead, may=May.USE_DEVICE)
