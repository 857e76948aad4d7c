"""Files that are not decoded."""

from enum import StrEnum


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
