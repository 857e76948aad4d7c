"""Where the embeddings of `vitwire encode` go."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitwire import Embedding, Model


@dataclass(frozen=True, slots=True)
class Encoded:
    """One encoded file; `name` is unique among the files of the command."""

    position: int
    file: Path
    name: str
    grid: tuple[int, int, int]
    embedding: Embedding

    @property
    def milliseconds(self) -> float:
        """Time on the server, waiting included."""
        return (self.embedding.report.queued + self.embedding.report.encoded) * 1e3

    def summary(self) -> dict[str, object]:
        """What `--json` prints of the file."""
        report = self.embedding.report
        return {
            "file": str(self.file),
            "name": self.name,
            "grid": self.grid,
            "tokens": self.embedding.shape[0],
            "shape": self.embedding.shape,
            "path": report.path,
            "fallback_reason": report.fallback_reason,
            "budget_tokens": report.budget_tokens or None,
            "ms": round(self.milliseconds, 3),
        }


@dataclass(frozen=True, slots=True)
class Failed:
    """A file that was not encoded."""

    position: int
    file: Path
    reason: str
    """Names the file."""

    @classmethod
    def of(cls, position: int, file: Path, error: Exception) -> "Failed":
        reason = str(error)
        return cls(position, file, reason if str(file) in reason else f"{file}: {reason}")

    def summary(self) -> dict[str, str]:
        """What `--json` prints of the file."""
        return {"file": str(self.file), "error": self.reason}


def unique_names(names: Sequence[str]) -> list[str]:
    """The names, a number put before the suffix of those that came before."""
    unique: list[str] = []
    for name in names:
        path, candidate, number = Path(name), name, 1
        while candidate in unique or (number > 1 and candidate in names):
            number += 1
            candidate = f"{path.stem}-{number}{path.suffix}"
        unique.append(candidate)
    return unique


def check_out(out: Path, count: int) -> None:
    """Raises ValueError when `count` embeddings cannot go to `out`."""
    kind = _kind(out)
    if kind not in ("", ".npy", ".safetensors"):
        raise ValueError(f"{out} is neither .safetensors nor .npy; a directory whose name has a dot must be there")
    if kind == ".npy" and count > 1:
        raise ValueError(f"{out} holds one embedding; name a directory or a .safetensors file for {count}")
    if kind and not out.parent.is_dir():
        raise ValueError(f"{out.parent} is no directory")
    if not kind and out.exists() and not out.is_dir():
        raise ValueError(f"{out} is no directory")


def write(out: Path, encoded: Sequence[Encoded], model: Model) -> None:
    """Write the rows as float32: a file by the suffix of `out`, or else a directory of .npy files."""
    kind = _kind(out)
    if kind == ".safetensors":
        from safetensors.numpy import save_file  # noqa: PLC0415  # only this format needs it

        metadata = {"model_id": model.model_id, "weights_fingerprint": model.weights_fingerprint}
        save_file({each.name: each.embedding.numpy() for each in encoded}, out, metadata)
    elif kind == ".npy":
        with out.open("wb") as file:  # given a name, numpy would append .npy to .NPY
            np.save(file, encoded[0].embedding.numpy())
    else:
        out.mkdir(parents=True, exist_ok=True)
        for each in encoded:
            np.save(out / f"{each.name}.npy", each.embedding.numpy())


def _kind(out: Path) -> str:
    """The suffix in lower case; empty for a directory."""
    return "" if out.is_dir() else out.suffix.lower()
