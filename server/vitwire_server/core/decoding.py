"""Files and pictures that are not decoded."""

from enum import StrEnum

MAX_PICTURE_PIXELS = 89_478_485
"""Of a picture, whatever the settings allow: a quarter of a GiB as RGB, where Pillow starts to warn."""


class Fault(StrEnum):
    """Why a file was not decoded."""

    MALFORMED = "malformed"
    UNSUPPORTED = "unsupported"
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"
    CRASHED = "crashed"
    """It ended the decoder by a fault of memory access or the like."""
    LOST = "lost"
    """The decoder was killed, or could not be started: not the file's fault."""
