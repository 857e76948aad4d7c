"""Bearer tokens from a file."""

import hashlib
import hmac
import logging
import re
from collections.abc import Mapping
from pathlib import Path

from vitwire_server.core.files import read_regular
from vitwire_server.rpc.file_watch import FileWatch

_log = logging.getLogger(__name__)
_NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)
_SHORT = 16
_MOST_BYTES = 16 << 20


class Tokens:
    """The tokens in a file.

    One token a line, optionally followed by its name; `#` starts a comment line. Only digests of the tokens
    are kept.
    """

    def __init__(self, path: Path) -> None:
        """Reads the file. Raises OSError, or ValueError if the file is invalid or empty."""
        self._path = path
        self._watch = FileWatch(path)
        self._names = _read(path)
        if not self._names:
            raise ValueError(f"{path} contains no token")

    def name(self, token: str) -> str | None:
        """The name of this token; None for a token that is not in the file.

        Takes the same time for every token, valid or not.
        """
        digest = _digest(token)
        found = None
        for known, name in self._names.items():
            if hmac.compare_digest(known, digest):
                found = name
        return found

    def refresh(self) -> None:
        """Read the file again if it changed.

        A file that cannot be read, or is invalid, leaves the previous tokens in place; with an empty one every RPC
        is refused.
        """
        if not self._watch.changed():
            return
        try:
            self._names = _read(self._path)
        except (OSError, ValueError) as error:
            _log.error("keeping the previous tokens: %s", error)
        else:
            level = logging.INFO if self._names else logging.WARNING
            _log.log(level, "reloaded %d tokens from %s", len(self._names), self._path)


def _read(path: Path) -> Mapping[bytes, str]:
    """Names by digest."""
    names: dict[bytes, str] = {}
    for number, line in enumerate(read_regular(path, _MOST_BYTES).decode().splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        where = f"{path}, line {number}"
        token, *rest = words
        if not token.isascii() or not token.isprintable():
            raise ValueError(f"{where}: a token must be printable ASCII")
        if len(rest) > 1 or (rest and not _NAME.fullmatch(rest[0])):
            raise ValueError(f"{where}: after the token, at most a name of letters, digits and _ . @ - is allowed")
        if len(token) < _SHORT:
            _log.warning("%s: a token of %d characters can be guessed; use %d or more", where, len(token), _SHORT)
        digest = _digest(token)
        if digest in names:
            raise ValueError(f"{where}: this token is a duplicate")
        names[digest] = rest[0] if rest else f"token-{digest.hex()[:16]}"
    return names


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
