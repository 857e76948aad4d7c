"""Files that operators name: opened only if they are regular, as a pipe or a device may block for ever."""

import errno
import logging
import os
import stat
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import BinaryIO

_log = logging.getLogger(__name__)


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file. Raises OSError, also if the file is larger than `most_bytes`."""
    with open(path, "rb", opener=_opened) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"the file is larger than {most_bytes} bytes", str(path))
    return content


def append_regular(path: Path) -> BinaryIO:
    """A regular file, created if it does not exist, to which each write appends at once. Raises OSError."""
    return open(path, "ab", buffering=0, opener=_opened)


def replace_file(path: Path, content: bytes) -> None:
    """Write another file and rename it, so that readers see the old or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{token_hex(8)}")
    try:
        with aside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink()
        raise


def _opened(path: str, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a pipe without a reader, or a socket
            raise _not_regular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path)
    return descriptor


def _not_regular(path: str) -> OSError:
    return OSError(errno.EINVAL, "not a regular file", str(path))


class WatchedFiles(ABC):
    """Files that are read again if they change. Used by one thread at a time."""

    def __init__(self, what: str, *paths: Path) -> None:
        """`what` the files hold, for the log."""
        self._what = what
        self._paths = paths
        self._seen = [_signature(path) for path in paths]

    def refresh(self) -> None:
        """Read the files again if one changed. If they cannot be used, the previous content stays until they change."""
        before, self._seen = self._seen, [_signature(path) for path in self._paths]
        if self._seen == before:
            return
        try:
            self._read_again()
        except (OSError, ValueError) as error:
            _log.error("keeping the previous %s: %s", self._what, error)

    @abstractmethod
    def _read_again(self) -> None:
        """Raises OSError or ValueError, and changes nothing then."""


def _signature(path: Path) -> tuple[int, int, int] | None:
    """Differs when a file was written or replaced; None without a file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
