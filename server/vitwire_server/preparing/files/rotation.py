"""The way in which a clip is shown: rotated and mirrored by its display matrix. Runs in decoders only."""

from contextlib import suppress
from io import BytesIO
from struct import unpack_from
from typing import NamedTuple

import av
import numpy as np
import numpy.typing as npt
from av.video.stream import VideoStream

Frame = npt.NDArray[np.uint8]
_NO_FRAMES = {"movflags": "empty_moov+default_base_moof"}
_TRACK, _MATRIX, _MATRIX_AT = b"tkhd", ">5i", 44
"""The box of an MP4 file with the matrix, its first numbers, and their place behind the box's name."""
_STEEPEST = 115
"""Matrices within half a degree of 90 degrees count as those, as FFmpeg rounds them."""


class Rotation(NamedTuple):
    """Steps that make a frame upright, in this order."""

    transposed: bool = False
    upside_down: bool = False
    mirrored: bool = False

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of a rotated frame."""
        return (width, height) if self.transposed else (height, width)

    @property
    def is_mirror_image(self) -> bool:
        """Whether no turn alone makes a frame upright. OpenCV, and so vLLM, only turns frames."""
        return (self.transposed + self.upside_down + self.mirrored) % 2 == 1

    def applied(self, frame: Frame) -> Frame:
        """A view of a frame `(H, W, 3)`."""
        upright = frame.swapaxes(0, 1) if self.transposed else frame
        return upright[:: -1 if self.upside_down else 1, :: -1 if self.mirrored else 1]


def rotation_of(stream: VideoStream) -> Rotation:
    """The rotation to show a stream by, as FFmpeg has it; none for angles between quarters, as OpenCV."""
    across, down_by_across, _, across_by_down, down = _matrix(stream)
    if _STEEPEST * max(abs(down_by_across), abs(across_by_down)) < min(abs(across), abs(down)):
        return Rotation(transposed=False, upside_down=down < 0, mirrored=across < 0)
    if _STEEPEST * max(abs(across), abs(down)) < min(abs(down_by_across), abs(across_by_down)):
        return Rotation(transposed=True, upside_down=down_by_across < 0, mirrored=across_by_down < 0)
    return Rotation()


def _matrix(stream: VideoStream) -> tuple[int, ...]:
    """The display matrix, up to its fifth number. PyAV passes it to writers only: it is read in a file without frames.

    Streams that an MP4 file cannot hold (VP8, and those of damaged files) are shown as they are.
    """
    with suppress(av.FFmpegError, ValueError), BytesIO() as file:
        with av.open(file, "w", "mp4", options=_NO_FRAMES) as container:
            container.add_stream_from_template(stream, opaque=True)
            container.start_encoding()
        header = file.getvalue()
        return unpack_from(_MATRIX, header, header.index(_TRACK) + _MATRIX_AT)
    return 1, 0, 0, 0, 1
