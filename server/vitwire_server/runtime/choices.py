"""What was chosen by measurement on a device, kept on disk beside Triton's compiled kernels."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import triton


@dataclass(slots=True)
class Choices:
    """Names of choices by the name of what was measured, for one device and version of the libraries."""

    _path: Path
    _made: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, device: torch.device, library: int) -> "Choices":
        """The choices that were kept for a device of this kind; none if the file cannot be read."""
        name = "".join(c if c.isalnum() else "-" for c in torch.cuda.get_device_name(device))
        versions = f"{library}-{torch.__version__}-{triton.__version__}"
        choices = cls(Path(triton.knobs.cache.dir) / f"vitwire-products-{name}-{versions}.json")
        with suppress(OSError, ValueError):
            kept = json.loads(choices._path.read_text(encoding="utf-8"))
            choices._made.update({str(key): str(value) for key, value in kept.items()})
        return choices

    def get(self, name: str) -> str | None:
        """What was chosen; None if it was not measured yet."""
        return self._made.get(name)

    def put(self, name: str, choice: str) -> None:
        """Keep a choice; on disk if possible."""
        self._made[name] = choice
        whole = self._path.with_suffix(f".{os.getpid()}")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            whole.write_text(json.dumps(self._made), encoding="utf-8")
            whole.replace(self._path)
