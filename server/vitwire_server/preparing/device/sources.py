"""Decoders of coded frames: NVIDIA's on a GPU, and PyAV's in their place on a CPU."""

import os
from collections.abc import Collection, Iterator, Sequence
from threading import Lock
from typing import Any, NamedTuple, Protocol

import av
import numpy as np
import torch
from av import Packet
from av.video.stream import VideoStream
from torch import Tensor

from vitwire_children.serving import Fault, NotDone

_FILTERS = {"h264": "h264_mp4toannexb", "hevc": "hevc_mp4toannexb"}
"""FFmpeg's filters that bring packets into the form that NVDEC reads."""
_CODECS = {"h264": "H264", "hevc": "HEVC"}
"""NVDEC's names. Damage in VP9 would not be noticed, and AV1 is not decoded by an H200."""
_HALVED = 1
"""cudaVideoChromaFormat of 4:2:0."""
_MOST_AREA = 16 << 20
"""Pixels of a frame, over all decoders that are kept or all that work: each holds about 20 frames."""
_LEAST_AREA = 1 << 20
"""A decoder of smaller frames takes as much memory."""
_MOST_SAID = 1 << 15
"""Bytes about the damage of a clip, half of what a pipe holds."""


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
    starts: bool
    """Whether a decoder can start there."""
    is_unneeded: bool
    """Whether no other frame refers to it."""


class Source(Protocol):
    """Decodes frames of a stream that begin with a keyframe."""

    def most(self, stream: VideoStream) -> int:
        """How many decoders work on such a stream at the same time; it begins now. Raises NotDone if none does."""

    def decoded(self, stream: VideoStream, coded: Sequence[Coded], chosen: Collection[int]) -> Iterator[Samples]:
        """Samples of the frames of these times, as they are shown; each is valid until the next. Raises NotDone."""

    def is_damaged(self) -> bool:
        """Whether damage was found since the last call, though frames were decoded."""


class OnCpu:
    """PyAV's decoders."""

    def most(self, stream: VideoStream) -> int:  # noqa: ARG002 - a Source
        """As Source has it."""
        return 2

    def decoded(self, stream: VideoStream, coded: Sequence[Coded], chosen: Collection[int]) -> Iterator[Samples]:
        """As Source has it; raises PyAV's errors too."""
        context: Any = av.CodecContext.create(stream.codec_context.codec, "r")
        context.extradata, context.thread_count = stream.codec_context.extradata, 1
        for packet in (*(each.packet for each in coded), None):
            for frame in context.decode(packet):
                if frame.pts not in chosen:
                    continue
                luma, u, v = (
                    np.frombuffer(plane, np.uint8).reshape(plane.height, plane.line_size)[:, : plane.width]
                    for plane in frame.planes
                )
                yield Samples(frame.pts, torch.from_numpy(luma), torch.from_numpy(np.stack([u, v], -1)))

    def is_damaged(self) -> bool:
        """As Source has it."""
        return False


class _Kind(NamedTuple):
    codec: str
    width: int
    height: int

    @classmethod
    def of(cls, stream: VideoStream) -> "_Kind":
        return cls(stream.codec_context.codec.canonical_name, stream.width, stream.height)

    @property
    def area(self) -> int:
        return self.width * self.height


class Nvdec:
    """NVIDIA's decoders, by PyNvVideoCodec. They are kept for other clips of the same size: to make one takes 0.3 s.

    A decoder gets whole streams, which begin with a keyframe, so that no frame refers to one of an earlier clip.
    The library returns frames of damaged streams too, and says so on standard output only, which is read here.
    """

    def __init__(self, index: int) -> None:
        """Raises ImportError, or PyNvVideoCodec's errors."""
        import PyNvVideoCodec  # noqa: PLC0415 - it needs a driver

        self._nvc: Any = PyNvVideoCodec
        self._index = index
        self._errors = self._nvc.PyNvVCException, self._nvc.PyNvVCExceptionUnsupported
        self._able: dict[str, dict[str, int]] = {codec: self._abilities(name) for codec, name in _CODECS.items()}
        self._kept: list[tuple[_Kind, Any]] = []
        self._lock = Lock()
        self._said, self._heard = os.pipe2(os.O_NONBLOCK)

    def _abilities(self, name: str) -> dict[str, int]:
        codec, chroma = getattr(self._nvc.cudaVideoCodec, name), self._nvc.cudaVideoChromaFormat(_HALVED)
        return dict(self._nvc.GetDecoderCaps(gpuid=self._index, codec=codec, chromaformat=chroma, bitdepth=8))

    def most(self, stream: VideoStream) -> int:
        """As Source has it."""
        kind = _Kind.of(stream)
        able = self._able[kind.codec]
        fits = all(able[f"{axis}_min"] <= getattr(kind, axis) <= able[f"{axis}_max"] for axis in ("width", "height"))
        if not able["supported"] or not fits or kind.area > _MOST_AREA:
            raise NotDone(Fault.LOST, f"NVDEC decodes no {kind.codec} of {kind.width}x{kind.height} here")
        os.dup2(self._heard, 1)
        self.is_damaged()  # of a clip before, which was given up
        return min(able["num_decoder_engines"], _MOST_AREA // kind.area)

    def decoded(self, stream: VideoStream, coded: Sequence[Coded], chosen: Collection[int]) -> Iterator[Samples]:
        """As Source has it."""
        kind, given = _Kind.of(stream), self._nvc.PacketData()
        annex_b = av.BitStreamFilterContext(_FILTERS[kind.codec], stream)
        try:
            decoder = self._taken(kind)
            for each in (*coded, None):  # no bytes end the stream
                for packet in annex_b.filter(each.packet) if each else (b"",):
                    data = np.frombuffer(memoryview(packet), np.uint8)
                    given.bsl, given.bsl_data, given.pts = len(data), data.ctypes.data, each.time if each else 0
                    yield from (self._samples(frame) for frame in decoder.Decode(given) if frame.timestamp in chosen)
        except self._errors as error:
            raise NotDone(Fault.LOST, str(error)) from error
        with self._lock:
            self._kept.append((kind, decoder))

    def _samples(self, frame: Any) -> Samples:  # noqa: ANN401 - PyNvVideoCodec has no types
        if frame.format != self._nvc.Pixel_Format.NV12:
            raise NotDone(Fault.LOST, f"NVDEC decodes it to {frame.format}")
        luma, chroma = (torch.as_tensor(plane, device=f"cuda:{self._index}") for plane in frame.cuda())
        return Samples(frame.timestamp, luma[..., 0], chroma)

    def _taken(self, kind: _Kind) -> Any:  # noqa: ANN401 - as above
        with self._lock:
            for at, (kept, decoder) in enumerate(self._kept):
                if kept == kind:
                    del self._kept[at]
                    return decoder
            while sum(max(kept.area, _LEAST_AREA) for kept, _ in self._kept) + kind.area > _MOST_AREA:
                del self._kept[0]
        codec, (width, height) = getattr(self._nvc.cudaVideoCodec, _CODECS[kind.codec]), kind[1:]
        own = {"gpuid": self._index, "cudacontext": 0, "cudastream": 0, "usedevicememory": 1}
        return self._nvc.CreateDecoder(codec=codec, maxwidth=width, maxheight=height, **own)

    def is_damaged(self) -> bool:
        """As Source has it. Its decoders are not used again."""
        try:
            said = os.read(self._said, 2 * _MOST_SAID)
        except BlockingIOError:
            return False
        if len(said) >= _MOST_SAID:
            raise SystemExit("the pipe may have been full, and what follows would not be noticed")
        self._kept.clear()
        return True
