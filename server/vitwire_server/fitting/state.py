"""What a server learned, in a file that its restart begins with: a ladder and the loads that it was fitted to."""

import logging
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

import msgspec

from vitwire_server.core.files import read_regular
from vitwire_server.fitting.histogram import is_histogram
from vitwire_server.fitting.refits import Learned

_log = logging.getLogger(__name__)
_FORMAT = 1
_MOST_BYTES = 1 << 20
_MOST_BUDGETS = 256


class Header(msgspec.Struct, frozen=True):
    """What must be the same where a file is used."""

    format: int
    weights: str
    """Their fingerprint."""
    device: str
    """The device's name, as its costs decide what is learned."""
    largest: int
    """Tokens of the largest budget."""


class _Document(Header, frozen=True):
    budgets: list[int]
    loads: dict[int, float]


@dataclass(frozen=True, slots=True)
class StateFile:
    """The file of one model on one kind of device. Processes may share it: each write replaces it whole."""

    path: Path
    header: Header

    @classmethod
    def in_folder(cls, folder: Path, fingerprint: str, device: str, largest: int) -> "StateFile":
        """The file in a folder that may have those of other models and devices."""
        name = re.sub(r"[^a-z0-9]+", "-", f"{fingerprint[:16]}-{device}".lower()).strip("-")
        return cls(folder / f"vitwire-ladder-{name}.json", Header(_FORMAT, fingerprint, device, largest))

    def read(self) -> Learned | None:
        """What was learned before. A file that cannot be used is ignored with a log line."""
        try:
            learned = self._parsed(read_regular(self.path, _MOST_BYTES))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, RecursionError, msgspec.DecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            _log.warning("%s is ignored, and replaced when a ladder is learned: %s", self.path, reason)
            return None
        _log.info("beginning with the %d budgets of %s", len(learned.sizes), self.path)
        return learned

    def write(self, learned: Learned) -> None:
        """Replace the file. An error is logged; nothing depends on the file."""
        loads = {size: round(weight, 4) for size, weight in learned.loads.items()}
        document = _Document(**msgspec.structs.asdict(self.header), budgets=list(learned.sizes), loads=loads)
        try:
            _replace(self.path, msgspec.json.encode(document) + b"\n")
        except OSError as error:
            _log.warning("the learned ladder is not kept over a restart: %s", error)

    def _parsed(self, raw: bytes) -> Learned:
        """Raises ValueError, RecursionError or msgspec.DecodeError."""
        document = msgspec.json.decode(raw, type=_Document)
        for key, own in msgspec.structs.asdict(self.header).items():
            if (found := getattr(document, key)) != own:
                raise ValueError(f"{key} is {found!r}, this server has {own!r}")
        sizes, largest = sorted(set(document.budgets)), self.header.largest
        if not 1 <= len(sizes) <= _MOST_BUDGETS or sizes[0] < 1 or sizes[-1] != largest:
            raise ValueError(f"budgets must be 1 to {_MOST_BUDGETS} token counts, the largest {largest}")
        if not is_histogram(document.loads, largest):
            raise ValueError(f"loads must be weights of token counts up to {largest}")
        return Learned(tuple(sizes), document.loads)


def _replace(path: Path, content: bytes) -> None:
    """Write a file beside it and rename that, so that readers see the old or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        try:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except OSError:
            with suppress(OSError):
                Path(file.name).unlink()
            raise
