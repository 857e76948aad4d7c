"""What a server learned, in a file that its restart begins with: a ladder and the loads that it was fitted to."""

import json
import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from vitwire_server.fitting.histogram import is_histogram

_log = logging.getLogger(__name__)
_FORMAT = 1
_MOST_BYTES = 1 << 20
_MOST_BUDGETS = 256


@dataclass(frozen=True, slots=True)
class Learned:
    """A ladder and the histogram behind it."""

    sizes: tuple[int, ...]
    loads: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class StateFile:
    """The file of one model on one kind of device. Processes may share it: each write replaces it whole."""

    path: Path
    fingerprint: str
    """Of the weights."""
    device: str
    """The device's name, as its costs decide what is learned."""
    largest: int
    """Tokens of the largest budget."""

    @classmethod
    def in_folder(cls, folder: Path, fingerprint: str, device: str, largest: int) -> "StateFile":
        """The file in a folder that may have those of other models and devices."""
        name = re.sub(r"[^a-z0-9]+", "-", f"{fingerprint[:16]}-{device}".lower()).strip("-")
        return cls(folder / f"vitwire-ladder-{name}.json", fingerprint, device, largest)

    def read(self) -> Learned | None:
        """What was learned before. A file that cannot be used is ignored with a log line."""
        try:
            with self.path.open("rb") as file:
                raw = file.read(_MOST_BYTES + 1)
            learned = self._parsed(raw)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            _log.warning("%s is ignored, and replaced when a ladder is learned: %s", self.path, _reason(error))
            return None
        _log.info("beginning with the %d budgets of %s", len(learned.sizes), self.path)
        return learned

    def write(self, learned: Learned) -> None:
        """Replace the file. An error is logged; nothing depends on the file."""
        loads = {str(size): round(weight, 4) for size, weight in learned.loads.items()}
        document = self._header | {"budgets": list(learned.sizes), "loads": loads}
        try:
            _replace(self.path, json.dumps(document) + "\n")
        except OSError as error:
            _log.warning("the learned ladder is not kept over a restart: %s", error)

    @property
    def _header(self) -> dict[str, Any]:
        return {"format": _FORMAT, "weights": self.fingerprint, "device": self.device, "largest": self.largest}

    def _parsed(self, raw: bytes) -> Learned:
        """Raises ValueError, KeyError, TypeError or RecursionError."""
        if len(raw) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        document = json.loads(raw)
        for key, own in self._header.items():
            if document[key] != own:
                raise ValueError(f"{key} is {document[key]!r}, this server has {own!r}")
        sizes = sorted({int(size) for size in document["budgets"]})
        loads = {int(size): float(weight) for size, weight in document["loads"].items()}
        if not 1 <= len(sizes) <= _MOST_BUDGETS or sizes[0] < 1 or sizes[-1] != self.largest:
            raise ValueError(f"budgets must be 1 to {_MOST_BUDGETS} token counts up to {self.largest}")
        if not is_histogram(loads, self.largest):
            raise ValueError(f"loads must be weights of token counts up to {self.largest}")
        return Learned(tuple(sizes), loads)


def _replace(path: Path, text: str) -> None:
    """Write a file beside it and rename that, so that readers see the old or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except OSError:
            with suppress(OSError):
                Path(file.name).unlink()
            raise


def _reason(error: Exception) -> str:
    match error:
        case OSError():
            return error.strerror or str(error)
        case json.JSONDecodeError() | UnicodeDecodeError():
            return "it is not JSON"
        case KeyError():
            return f"it has no {error}"
        case AttributeError() | TypeError():
            return "it is not a file that vitwire-server wrote"
    return str(error)
