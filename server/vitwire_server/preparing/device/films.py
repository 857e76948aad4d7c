"""A decoder of clips on the model's device: NVDEC decodes, `colours` converts, and the kernel of `device` prepares.

It is a process with a separate context on the device, outside of MPS, as the decoder of JPEG files. PyAV takes packets
out of the file, so that frames and their times are the CPU decoders'. Groups of pictures that do not refer to each
other are decoded at the same time, each by a decoder. On a CPU PyAV decodes too, which shows that the way works.
"""

import errno
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from io import BytesIO
from itertools import accumulate, pairwise
from pathlib import Path
from shutil import which
from tempfile import gettempdir
from typing import Any

import av
import numpy as np
import torch
from av.container import InputContainer
from av.video.stream import VideoStream
from msgspec import to_builtins
from torch import Tensor

from vitwire_children.confine import May
from vitwire_children.landlock import bind
from vitwire_children.serving import Answering, Fault, NotDone, serve
from vitwire_server.core.decoding import CLIP_TENSORS_BYTES
from vitwire_server.preparing.device import units
from vitwire_server.preparing.device.colours import Colours, rgb
from vitwire_server.preparing.device.hardware import DRAWN, difference_of, take, write
from vitwire_server.preparing.device.resizing import prepared
from vitwire_server.preparing.device.sources import Coded, Nvdec, OnCpu, Source
from vitwire_server.preparing.files import clips
from vitwire_server.preparing.files.messages import Decode, Decoded, Film, Setup
from vitwire_server.preparing.files.rotation import Rotation
from vitwire_server.preparing.files.worker import shared_memory

_ENCODERS = {"libx264": {"bf": "2", "g": "4"}, "libx265": {"x265-params": "log-level=none"}}
"""Encoders of the drawn clips, with their options."""
_SEEN = ("/usr", "/lib", "/lib64", "/proc", "/sys", "/etc/ld.so.cache", "/dev/urandom")
"""What Python, CUDA and a C compiler read, beside Python's own folders."""
_WRITTEN = ("/dev/null", "/proc/self/oom_score_adj", "/proc/self/task")
"""The last for CUDA, which names its threads and does not start otherwise."""
_CACHES = {"TRITON_CACHE_DIR": "~/.triton", "CUDA_CACHE_PATH": "~/.nv", "TMPDIR": gettempdir()}
"""Folders that CUDA, Triton and a C compiler write into, by the variable that moves each."""
_COMPILERS = [
    str(Path(found).resolve().parents[1])
    for name in (os.environ.get("CC", ""), "gcc", "clang")
    if (found := which(name))
]
"""Where each C compiler that Triton may use was installed."""
_DEVICES = [*map(str, Path("/dev").glob("nvidia*"))]
"""Now: later this process may not list the folder."""
_PROBE_FRAMES = 8
_MOST_CROPPED = 64
"""Pixels of each side: a coding tree block of HEVC."""


def _coded(container: InputContainer, stream: VideoStream, nbytes: int) -> Iterator[Coded]:
    """The frames of a file of `nbytes`. Raises NotDone, ValueError or PyAV's errors."""
    codec = stream.codec_context.codec.canonical_name
    sequence = units.sequence_of(codec, stream.codec_context.extradata or b"")
    width, height, number_bits = units.coding_of(codec, sequence)
    number = 0
    if width - stream.width > _MOST_CROPPED or height - stream.height > _MOST_CROPPED:
        raise NotDone(Fault.LOST, f"its frames are coded as {width}x{height}")
    for packet in container.demux(stream):
        nbytes -= packet.size
        if nbytes < 0:
            raise NotDone(Fault.LOST, "its frames overlap in the file")
        if packet.has_sidedata("new_extradata"):
            raise NotDone(Fault.LOST, "its frames bring other settings than the file")
        if packet.size and packet.pts is not None:
            frame = units.frame_of(codec, bytes(packet), sequence, number_bits)
            if not frame.starts and frame.number != (number + 1) % (1 << number_bits):
                raise NotDone(Fault.LOST, "frames are missing in it")
            number = number if frame.is_unneeded else frame.number
            yield Coded(packet.pts, packet, packet.is_keyframe and frame.starts, frame.is_unneeded)


def parts_of(coded: Sequence[Coded], chosen: Collection[int], most: int) -> list[list[Coded]]:
    """Runs of frames that can be decoded alone, with all chosen times in them; at most `most`, about equally long.

    A run begins where a decoder can start, with a frame that is shown after all frames before it, and before all behind
    it. Raises NotDone.
    """
    before = [-1 << 62, *accumulate((each.time for each in coded), max)]
    behind = [*accumulate((each.time for each in reversed(coded)), min)][::-1]
    starts = [at for at, each in enumerate(coded) if each.starts and before[at] < each.time <= behind[at]]
    if not starts or starts[0]:
        raise NotDone(Fault.LOST, "it does not start with a keyframe")
    needed = []
    for start, end in pairwise([*starts, len(coded)]):
        last = max((at for at in range(start, end) if coded[at].time in chosen), default=start - 1)
        needed.append(coded[start : last + 1])
    total, done = sum(map(len, needed)), 0
    parts: list[list[Coded]] = [[] for _ in range(most)]
    for group in filter(None, needed):
        parts[done * most // total] += group
        done += len(group)
    return [*filter(None, parts)]


def turned(picture: Tensor, rotation: Rotation) -> Tensor:
    """A picture `(H, W, 3)` as `Rotation.applied` turns it."""
    upright = picture.transpose(0, 1) if rotation.transposed else picture
    axes = [axis for axis, is_flipped in enumerate((rotation.upside_down, rotation.mirrored)) if is_flipped]
    return upright.flip(axes) if axes else upright


def frames_of(data: bytes, film: Film, source: Source, device: torch.device) -> Tensor:
    """The chosen frames in RGB, upright, `(F, H, W, 3)` uint8. Raises NotDone, ValueError or PyAV's errors."""
    colours, rotation = Colours(*film.colours), Rotation(*film.rotation)
    with clips.opened(data, decodes=False) as (container, stream):
        if not colours.is_known or (stream.height, stream.width) != film.size:
            raise NotDone(Fault.LOST, "it is not for the device")
        most = source.most(stream)
        places = {time: at for at, time in enumerate(film.times)}
        coded = [each for each in _coded(container, stream, len(data)) if each.time in places or not each.is_unneeded]
        if not 0 < sum(each.time in places for each in coded) == len(film.times):
            raise NotDone(Fault.LOST, "some of its frames are missing, or have the same time")
        pictures = torch.empty((len(places), *rotation.size(*film.size), 3), dtype=torch.uint8, device=device)

        def convert(part: Sequence[Coded]) -> int:
            found = set()
            for samples in source.decoded(stream, part, places):
                found.add(samples.time)
                if samples.luma.shape != film.size:
                    raise NotDone(Fault.LOST, "its frames change their size")
                picture = rgb(samples.luma, samples.chroma, colours)
                pictures[places[samples.time]] = turned(picture, rotation)
            return len(found)

        with ThreadPoolExecutor(most) as threads:
            found = sum(threads.map(convert, parts_of(coded, places, most)))
    if source.is_damaged() or found != len(places):
        raise NotDone(Fault.LOST, "it is damaged")
    return pictures


def drawn(height: int = 144, width: int = 194) -> list[bytes]:
    """Clips with smooth and noisy parts, one for each codec. Raises PyAV's errors without an encoder."""
    rng = np.random.default_rng(0)
    whole = rng.integers(0, 256, (height // 8, (width + _PROBE_FRAMES) // 8 + 1, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    made = []
    for encoder, options in _ENCODERS.items():
        with BytesIO() as file:
            with av.open(file, "w", "mp4") as container:
                stream: Any = container.add_stream(encoder, rate=10, options=options)
                stream.height, stream.width, stream.pix_fmt = len(whole), width, "yuv420p"
                for at in range(_PROBE_FRAMES):
                    picture = np.ascontiguousarray(whole[:, at : at + width])
                    container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
                container.mux(stream.encode())
            made.append(file.getvalue())
    return made


def fault_of(source: Source, files: Sequence[bytes]) -> str:
    """Why clips are not decoded by it; empty if the frames of these are close enough to PyAV's."""
    for data in files:
        with clips.opened(data) as (container, stream):
            expected = {frame.pts or 0: frame.to_ndarray(format="rgb24") for frame in container.decode(stream)}
        made = {}
        with clips.opened(data) as (container, stream):
            name = stream.codec_context.codec.canonical_name
            source.most(stream)
            for samples in source.decoded(stream, list(_coded(container, stream, len(data))), expected):
                colours = Colours(*clips.colours_of(stream))
                made[samples.time] = rgb(samples.luma, samples.chroma, colours).cpu().numpy()
        if source.is_damaged() or made.keys() != expected.keys():
            return f"a clip in {name} of {len(expected)} frames has {len(made)}"
        differences = [np.abs(made[at].astype(np.int16) - expected[at]) for at in expected]
        if fault := difference_of(np.stack(differences), "PyAV"):
            return f"{name} {fault}"
    return ""


def _bind(*caches: str) -> None:
    """Let this process open only the device, what libraries read, and these folders. Raises OSError."""
    folders = {sys.prefix, sys.base_prefix, *sys.path, *os.environ.get("LD_LIBRARY_PATH", "").split(":"), *_COMPILERS}
    bind([*_SEEN, *folders - {"", "/"}], [*_WRITTEN, *_DEVICES, *caches])


def _source(device: torch.device) -> Source:
    """Where this process decodes, once it has: the first use loads libraries and kernels, which is not possible later.

    Raises OSError, ImportError, or what the library raises.
    """
    if len([*Path("/proc/self/task").iterdir()]) > 1:
        raise OSError(errno.EBUSY, "threads run already, which Landlock would not bind")
    caches = [os.environ.get(name, str(Path(default).expanduser())) for name, default in _CACHES.items()]
    with suppress(OSError):
        Path(caches[0]).mkdir(parents=True, exist_ok=True)  # Triton's, which could not be made later
    _bind(*caches)
    source: Source = OnCpu()
    if device.type == "cuda":
        source = Nvdec(take(device))
        torch.cuda.set_per_process_memory_fraction(CLIP_TENSORS_BYTES / torch.cuda.mem_get_info()[1])
    fault_of(source, drawn())
    prepared(torch.zeros(2, 144, 194, 3, dtype=torch.uint8, device=device), DRAWN)[0].cpu()
    return source


def _ahead() -> Answering:
    device = torch.device(sys.argv[3])
    return partial(_answering, _source(device), device)


def _answering(source: Source, device: torch.device, setup: Setup) -> tuple[Callable[[Decode], object], None]:
    """Does jobs. Whatever is not expected ends the process, and with it all that the file left behind."""
    memory = shared_memory()
    _bind()

    def answer(job: Decode) -> object:
        start = time.perf_counter()
        recipe = setup.recipes[job.modality].within(job.areas).taking(job.frames)
        if not job.film:
            raise NotDone(Fault.LOST, "it is not for the device")
        try:
            frames = frames_of(memory[: job.nbytes], job.film, source, device)
            decoded = time.perf_counter()
            write(prepared(frames, recipe), memory, setup.sizes.input_bytes, job)
        except (ValueError, av.FFmpegError, torch.OutOfMemoryError) as error:
            raise NotDone(Fault.LOST, str(error)) from error
        return to_builtins(Decoded(decoded - start, time.perf_counter() - decoded))

    return answer, None


def _check() -> Answering:
    """Its job is to say why this device cannot decode; empty if it can, confined as a decoder is.

    The size is another than before, for which decoders are made then.
    """
    try:
        source, files = _source(torch.device(sys.argv[3])), drawn(208, 272)
    except Exception as error:  # noqa: BLE001 - of a driver or library: the reason is the answer
        fault = f"NVDEC cannot be used: {str(error).partition(chr(10))[0]}"
        return lambda _: (lambda _: fault, None)

    def answering(_: object) -> tuple[Callable[[object], str], None]:
        _bind()
        return lambda _: fault_of(source, files), None

    return answering


if __name__ == "__main__":
    serve(_check if sys.argv[2] == "check" else _ahead, may=May.OPEN)
