"""Where the embeddings of `vitwire encode` go."""

import os
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
            "file": printable(self.file),
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
    def of(cls, position: int, file: Path, error: Exception | str) -> "Failed":
        reason = str(error)
        return cls(position, file, reason if str(file) in reason else f"{file}: {reason}")

    def summary(self) -> dict[str, str]:
        """What `--json` prints of the file."""
        return {"file": printable(self.file), "error": printable(self.reason)}


def printable(name: Path | str) -> str:
    """The name as text; bytes that are not UTF-8, which Linux has no objection to, as escapes (`\\xff`)."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def unique_names(names: Sequence[str]) -> list[str]:
    """The names, a number put before the suffix of those that came before."""
    given, unique = set(names), dict[str, None]()
    for name in names:
        path, candidate, number = Path(name), name, 1
        while candidate in unique or (number > 1 and candidate in given):
            number += 1
            candidate = f"{path.stem}-{number}{path.suffix}"
        unique[candidate] = None
    return list(unique)


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


def write(out: Path, encoded: Sequence[Encoded], model: Model) -> tuple[list[Encoded], list[Failed]]:
    """Write the rows as float32: a file by the suffix of `out`, or else a directory of .npy files.

    Returns what was written, and the files of the directory that could not be. Raises OSError when nothing was.
    """
    kind = _kind(out)
    if kind == ".safetensors":
        _write_safetensors(out, encoded, model)
    elif kind == ".npy":
        with out.open("wb") as file:  # given a name, numpy would append .npy to .NPY
            np.save(file, encoded[0].embedding.numpy())
    else:
        return _write_folder(out, encoded)
    return list(encoded), []


def _write_safetensors(out: Path, encoded: Sequence[Encoded], model: Model) -> None:
    from safetensors import SafetensorError  # noqa: PLC0415  # only this format needs it
    from safetensors.numpy import save_file  # noqa: PLC0415  # as above

    metadata = {"model_id": model.model_id, "weights_fingerprint": model.weights_fingerprint}
    try:
        save_file({each.name: each.embedding.numpy() for each in encoded}, out, metadata)
    except SafetensorError as error:
        raise OSError(f"{out} cannot be written: {error}") from error


def _write_folder(out: Path, encoded: Sequence[Encoded]) -> tuple[list[Encoded], list[Failed]]:
    out.mkdir(parents=True, exist_ok=True)
    written: list[Encoded] = []
    failed: list[Failed] = []
    for each in encoded:
        try:
            np.save(out / f"{each.name}.npy", each.embedding.numpy())
        except OSError as error:
            failed.append(Failed.of(each.position, each.file, f"its embedding cannot be written: {error}"))
        else:
            written.append(each)
    return written, failed


def _kind(out: Path) -> str:
    """The suffix in lower case; empty for a directory."""
    return "" if out.is_dir() else out.suffix.lower()
