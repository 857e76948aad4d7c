"""API keys of the router."""

import hashlib
import hmac
from pathlib import Path

from vitwire_gateway.openai.errors import ApiError
from vitwire_gateway.openai.files import read_regular


class ApiKeys:
    """The keys in a file, one per line; `#` starts a comment line. The file is read again when it changes."""

    def __init__(self, file: Path) -> None:
        """Raises OSError or ValueError for a file without keys."""
        self._file = file
        self._seen: tuple[int, int, int] | None = None
        self._digests: list[bytes] = []
        self._read(self._version())

    def check(self, authorization: str | None) -> str:
        """A name for the caller by its key, which it does not reveal. Raises ApiError for none of the keys."""
        self._refresh()
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip())
        # All are compared, so that the time taken says nothing about which one was close.
        found = [hmac.compare_digest(digest, each) for each in self._digests]
        if scheme.lower() != "bearer" or not any(found):
            raise ApiError(
                401,
                "the API key is missing or wrong: send Authorization: Bearer KEY",
                "invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return digest.hex()

    def _refresh(self) -> None:
        """Read the file if it changed; a file that cannot be used leaves the keys as they are."""
        try:
            version = self._version()
            if version != self._seen:
                self._read(version)
        except (OSError, ValueError):
            return

    def _read(self, version: tuple[int, int, int]) -> None:
        digests = [_digest(key) for key in read_keys(self._file)]
        self._digests, self._seen = digests, version

    def _version(self) -> tuple[int, int, int]:
        stat = self._file.stat()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


def read_keys(file: Path) -> list[str]:
    """The keys in a file. Raises OSError, or ValueError if it has none."""
    lines = (line.strip() for line in read_regular(file).decode().splitlines())
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"{file} has no keys: expected one per line")
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
