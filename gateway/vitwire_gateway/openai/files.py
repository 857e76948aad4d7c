"""Regular files: opening a pipe or a device, which could block for ever, neither blocks nor succeeds."""

import os
import stat
from pathlib import Path


def opened_regular(path: str, flags: int) -> int:
    """For `open(opener=)`: the descriptor of a regular file. Raises OSError for any other."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("not a regular file")
    return descriptor


def read_regular(path: Path, most_bytes: int = 16 << 20) -> bytes:
    """The content of a regular file. Raises OSError, or ValueError if it is larger than `most_bytes`."""
    with open(path, "rb", opener=opened_regular) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"{path} is larger than {most_bytes} bytes")
    return content
