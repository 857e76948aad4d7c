"""Encoded clips: the frames that the model's rule chooses, and their pixels. Runs in decoders only."""

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from io import BytesIO
from math import prod
from typing import NamedTuple

import av
import av.subtitles.stream  # now: opening the first clip imports it
import numpy as np
from av import VideoFrame
from av.container import InputContainer
from av.video.stream import VideoStream
from msgspec.structs import replace

from vitwire_children.serving import Fault, NotDone
from vitwire_server.core.decoding import CLIP_FRAMES_BYTES
from vitwire_server.preparing.files.messages import MOST_FRAMES, Film, Measured
from vitwire_server.preparing.files.rotation import Frame, Rotation, rotation_of
from vitwire_server.preparing.rules.forms import form_of
from vitwire_server.preparing.rules.patches import CHANNELS
from vitwire_server.preparing.rules.recipe import Recipe
from vitwire_server.preparing.rules.sampling import sampled

_MARKS = (
    ("mp4", re.compile(b"....ftyp", re.DOTALL)),
    ("matroska", re.compile(b"\x1a\x45\xdf\xa3")),
    ("avi", re.compile(b"RIFF....AVI ", re.DOTALL)),
    ("mpegts", re.compile(b"G.{187}G|.{4}G.{191}G", re.DOTALL)),
)
"""How files of each format begin: FFmpeg would try every format that it knows."""
_CODECS = ("av1", "h264", "hevc", "mjpeg", "mpeg2video", "mpeg4", "vp8", "vp9")
"""FFmpeg's decoders that clips are made for today."""
_MAX_FRAMES = 1 << 20
_LAYERS_AT = 21
_FULL = 2
"""AVCOL_RANGE_JPEG."""
_FRAMES_OF_COST = 10
"""Frames that a decoder passes in the time that an image of their size takes."""
av.logging.set_level(None)  # files are untrusted: their oddities are not news


def measure(data: bytes, recipe: Recipe, max_pixels: int) -> Measured:
    """Form and cost of the prepared clip; decodes at most one frame. Raises NotDone, ValueError or PyAV's errors."""
    own = _chosen(data, recipe, max_pixels)
    indices, rate, (height, width) = own.indices, own.rate, own.size
    picture = (len(indices), height, width, CHANNELS)
    cost = width * height * (indices[-1] // _FRAMES_OF_COST + len(indices))
    seconds = tuple(index / rate for index in indices if rate)
    interval = recipe.temporal / (len(indices) / own.shown.total * rate) if rate else 0.0
    measured = Measured.of(form_of(picture, recipe), cost, picture)
    film = own.film if prod(picture) <= CLIP_FRAMES_BYTES and len(indices) <= MOST_FRAMES else None
    return replace(measured, frame_seconds=seconds, second_per_grid=interval, film=film)


@contextmanager
def decoded(data: bytes, recipe: Recipe, max_pixels: int) -> Iterator[tuple[Iterator[Frame], int]]:
    """The chosen frames, each decoded when it is taken, and their number. Raises as `measure`."""
    own = _chosen(data, recipe, max_pixels)
    with opened(data) as (container, stream):
        yield map(own.rotation.applied, _frames(container, stream, own)), len(own.indices)


class _Shown(NamedTuple):
    """The frames that are shown."""

    total: int
    times: list[int]
    """When each is shown, in the stream's unit; empty if that does not tell them apart."""


class _Chosen(NamedTuple):
    """The frames to use of a clip."""

    indices: list[int]
    shown: _Shown
    rate: float
    """Frames per second, or 0."""
    rotation: Rotation
    size: tuple[int, int]
    """Height and width of a frame that is turned."""
    film: Film | None
    """Unless NVDEC does not decode its frames as libavcodec does."""


def _chosen(data: bytes, recipe: Recipe, max_pixels: int) -> _Chosen:
    """The frames to use of a clip. Raises as `measure`."""
    if recipe.settings.sampling is None:
        raise NotDone(Fault.UNSUPPORTED, "the model has no rule to choose frames: send clips as pixels")
    with opened(data) as (container, stream):
        width, height = stream.width, stream.height
        if not width * height:
            raise NotDone(Fault.MALFORMED, "has no frame that can be decoded")
        if width * height > max_pixels:
            text = f"frames of {width}x{height} exceed the limit of {max_pixels} pixels (--max-image-pixels)"
            raise NotDone(Fault.TOO_LARGE, text)
        rate = float(stream.average_rate or 0)
        shown = _shown(data, container, stream)
        rotation = rotation_of(stream)
        colours = colours_of(stream)
        suits_device = bool(shown.times) and _suits_device(stream)
    if given := recipe.settings.sampling.given:
        if given[-1] >= shown.total:
            raise NotDone(Fault.UNSUPPORTED, f"has {shown.total} frames, and options.frames asks for frame {given[-1]}")
        if rotation.is_mirror_image:
            raise NotDone(Fault.UNSUPPORTED, "is mirrored by its display matrix: leave out options.frames")
    indices = sampled(shown.total, rate, recipe.settings.sampling, recipe.temporal)
    film = None
    if suits_device:
        film = Film(tuple(shown.times[index] for index in indices), (height, width), rotation, colours)
    return _Chosen(indices, shown, rate, rotation, rotation.size(height, width), film)


def _frames(container: InputContainer, stream: VideoStream, chosen: _Chosen) -> Iterator[Frame]:
    """The chosen frames as they are stored, each decoded when it is taken. Raises NotDone, or what PyAV raises."""
    size, times = (stream.width, stream.height), chosen.shown.times
    places, found = [times[index] for index in chosen.indices] if times else chosen.indices, 0
    for index, frame in enumerate(needed(container, stream, set(places) if times else ())):
        if places[found] == (frame.pts if times else index):
            if (frame.width, frame.height) != size:
                raise NotDone(Fault.UNSUPPORTED, "its frames change their size")
            yield frame.to_ndarray(format="rgb24").astype(np.uint8, copy=False)
            found += 1
        if found == len(places):
            return
    raise NotDone(Fault.MALFORMED, f"frame {chosen.indices[found]} is missing or cannot be decoded")


def needed(container: InputContainer, stream: VideoStream, chosen: Collection[int]) -> Iterator[VideoFrame]:
    """The frames of these times, and those that others refer to; all frames without times."""
    for packet in container.demux(stream):
        is_needed = not chosen or not packet.size or packet.pts in chosen
        stream.codec_context.skip_frame = "DEFAULT" if is_needed else "NONREF"
        yield from packet.decode()


def colours_of(stream: VideoStream) -> tuple[int, bool]:
    """Number of the matrix in ITU-T H.273, and whether luma takes all values from 0 to 255."""
    context = stream.codec_context
    return int(context.colorspace), int(context.color_range) == _FULL or context.pix_fmt == "yuvj420p"


def _suits_device(stream: VideoStream) -> bool:
    context = stream.codec_context
    return (
        _has_whole_lengths(context.codec.canonical_name, context.extradata or b"")
        and context.pix_fmt in ("yuv420p", "yuvj420p")
        and not (context.height | context.width) & 1
        and context.field_order in (0, 1)  # unknown or progressive: NVDEC would mix fields
    )


def _has_whole_lengths(codec: str, settings: bytes) -> bool:
    """Whether it is H.264 or HEVC, and units have lengths of four bytes in front, which `device.films` reads."""
    at = {"h264": 4, "hevc": _LAYERS_AT}.get(codec, len(settings))
    return settings[:1] == b"\x01" and settings[at : at + 1] != b"" and settings[at] & 3 == 3


@contextmanager
def opened(data: bytes, *, decodes: bool = True) -> Iterator[tuple[InputContainer, VideoStream]]:
    """A clip's file and its first stream. Raises NotDone or PyAV's errors.

    Unless it `decodes` a frame to learn them, which takes most of the time, pixel format and colours are not known.
    """
    name = next((name for name, start in _MARKS if start.match(data)), None)
    if name is None:
        raise NotDone(Fault.UNSUPPORTED, "is neither an MP4, WebM, AVI nor MPEG-TS file")
    options = {} if decodes else {"skip_frame": "all"}
    try:
        container = av.open(BytesIO(data), "r", name, options=options, metadata_errors="ignore")
    except av.FFmpegError:
        if name == "mp4" and b"moov" not in data:
            text = "is an MP4 without an index (moov), such as a recording that was cut off"
            raise NotDone(Fault.MALFORMED, text) from None
        raise
    with container:
        if not container.streams.video:
            raise NotDone(Fault.UNSUPPORTED, "has no video")
        stream = container.streams.video[0]
        codec = stream.codec_context.codec.canonical_name
        if codec not in _CODECS:
            raise NotDone(Fault.UNSUPPORTED, f"is coded as {codec}; supported are {', '.join(_CODECS)}")
        stream.thread_count = 1
        yield container, stream


def _shown(data: bytes, container: InputContainer, stream: VideoStream) -> _Shown:
    """Frames that will be shown, by the packets: the header may lack their number, or be wrong about it.

    Of a clip that starts between two keyframes, decoders show nothing before the first frame that they can make; a
    broadcast's first frames may need others even if it starts with a keyframe.
    """
    times: list[int | None] = []
    starts_whole = container.format.name != "mpegts"
    for packet in container.demux(stream):
        if packet.size > 0 and not packet.is_discard:
            starts_whole = starts_whole and (bool(times) or packet.is_keyframe)
            times.append(packet.pts)
        if len(times) > _MAX_FRAMES:
            raise NotDone(Fault.TOO_LARGE, f"has more than {_MAX_FRAMES} frames")
    if not starts_whole:
        first = _first_shown(data)
        return _Shown(sum(time is not None and time >= first for time in times), [])
    known = {time for time in times if time is not None}
    is_ordered = len(known) == len(times) > 0 and times[0] == min(known)  # else others than the first may not be shown
    return _Shown(len(times), sorted(known) if is_ordered and _marks_references(stream) else [])


def _marks_references(stream: VideoStream) -> bool:
    """Whether no frame refers to one that says so. With several temporal layers in HEVC, frames of a higher one may.

    Their number is in the 22nd byte of an MP4's configuration (ISO/IEC 14496-15, 8.3.3.1).
    """
    if stream.codec_context.codec.canonical_name != "hevc":
        return True
    settings = stream.codec_context.extradata or b""
    return settings[:1] == b"\x01" and len(settings) > _LAYERS_AT and settings[_LAYERS_AT] >> 3 & 7 == 1


def _first_shown(data: bytes) -> int:
    """When the first frame is shown. Raises NotDone, or what PyAV raises."""
    with opened(data) as (container, stream):
        frame = next(container.decode(stream), None)
    if frame is None or frame.pts is None:
        raise NotDone(Fault.MALFORMED, "has no frame that can be decoded")
    return frame.pts
