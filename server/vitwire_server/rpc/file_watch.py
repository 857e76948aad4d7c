"""Detects files that change while the server runs."""

import time
from pathlib import Path
from threading import Lock

_LOOK_SECONDS = 1.0
Signature = tuple[tuple[int, int, int] | None, ...]


class FileWatch:
    """Detects changes of files; checks at most once a second. Thread-safe."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._lock = Lock()
        self._looked = time.monotonic()
        self._seen = self._look()

    def changed(self) -> bool:
        """Whether a file changed since the last call that returned True."""
        with self._lock:
            now = time.monotonic()
            if now - self._looked < _LOOK_SECONDS:
                return False
            self._looked = now
            before, self._seen = self._seen, self._look()
            return self._seen != before

    def _look(self) -> Signature:
        return tuple(map(_signature, self._paths))


def _signature(path: Path) -> tuple[int, int, int] | None:
    """Differs when a file was written or replaced; None without a file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
