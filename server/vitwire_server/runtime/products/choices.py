"""Choices by measurement on a device, kept on disk next to Triton's compiled kernels."""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import triton

from vitwire_flags.regular_files import replace_file


@dataclass(slots=True)
class Choices:
    """Names of choices by the name of what was measured, for one device and version of the libraries."""

    _path: Path
    made: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, device: torch.device, *libraries: str) -> "Choices":
        """The choices kept for a device of this kind and these versions; none if the file cannot be read."""
        name = "".join(c if c.isalnum() else "-" for c in torch.cuda.get_device_name(device))
        versions = "-".join((*libraries, torch.__version__, triton.__version__))
        return cls.read(Path(triton.knobs.cache.dir) / f"vitwire-products-{name}-{versions}.json")

    @classmethod
    def read(cls, path: Path) -> "Choices":
        """The choices in a file; none if it cannot be read."""
        with suppress(OSError, ValueError, AttributeError, RecursionError):
            kept = json.loads(path.read_text(encoding="utf-8"))
            return cls(path, {str(key): str(value) for key, value in kept.items()})
        return cls(path)

    def get(self, name: str) -> str | None:
        """The choice; None if it was not measured yet."""
        return self.made.get(name)

    def put(self, name: str, choice: str) -> None:
        """Keep a choice; on disk if possible, with what other processes have kept since."""
        self.made = self.read(self._path).made | self.made | {name: choice}
        with suppress(OSError):
            replace_file(self._path, json.dumps(self.made).encode())
