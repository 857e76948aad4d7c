"""Detects files that change while the server runs."""

from pathlib import Path

Signature = tuple[tuple[int, int, int] | None, ...]


class FileWatch:
    """Detects changes of files. Used by one thread at a time."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._seen = self._look()

    def changed(self) -> bool:
        """Whether a file changed since the last call that returned True."""
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
