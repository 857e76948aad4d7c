"""Output files of `vitwire encode`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitwire import Embedding, Model, VitwireError


@dataclass(frozen=True, slots=True)
class Encoded:
    """One encoded file; `name`, a path, is unique among the files of the command."""

    position: int
    file: Path
    name: str
    grid: tuple[int, int, int]
    embedding: Embedding

    @property
    def milliseconds(self) -> float:
        """Time on the server, including the queue."""
        return (self.embedding.report.queued + self.embedding.report.encoded) * 1e3

    def summary(self) -> dict[str, object]:
        """The file's entry in the output of `--json`."""
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
    """The error message, which names the file."""
    request_id: str | None = None

    @classmethod
    def of(cls, position: int, file: Path, error: Exception | str) -> "Failed":
        reason = str(error)
        request_id = error.request_id if isinstance(error, VitwireError) else None
        return cls(position, file, reason if str(file) in reason else f"{file}: {reason}", request_id)

    def summary(self) -> dict[str, str | None]:
        """The file's entry in the output of `--json`."""
        return {"file": printable(self.file), "error": printable(self.reason), "request_id": self.request_id}


def printable(name: Path | str) -> str:
    """The name as text; bytes that are not UTF-8, which Linux allows, as escapes (`\\xff`)."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def unique_names(names: Sequence[str]) -> list[str]:
    """The names, with a number before the suffix of repeated ones."""
    given, unique = set(names), dict[str, None]()
    for name in names:
        path, candidate, number = Path(name), name, 1
        while candidate in unique or (number > 1 and candidate in given):
            number += 1
            candidate = str(path.with_name(f"{path.stem}-{number}{path.suffix}"))
        unique[candidate] = None
    return list(unique)


def check_out(out: Path, count: int) -> None:
    """Raises ValueError when `count` embeddings cannot go to `out`."""
    kind = _kind(out)
    if kind not in ("", ".npy", ".safetensors"):
        raise ValueError(f"{out} is neither .safetensors nor .npy; create it first if it is meant as a directory")
    if kind == ".npy" and count > 1:
        raise ValueError(f"{out} can hold one embedding; use a directory or a .safetensors file for {count}")
    if kind and not out.parent.is_dir():
        raise ValueError(f"{out.parent} is not a directory")
    if not kind and out.exists() and not out.is_dir():
        raise ValueError(f"{out} is not a directory")


def write(out: Path, encoded: Sequence[Encoded], model: Model) -> tuple[list[Encoded], list[Failed]]:
    """Write the rows as float32, to a file of the type of `out`'s suffix or to a directory of .npy files.

    Returns what was written and what could not be. Raises OSError if nothing could be written.
    """
    kind = _kind(out)
    if kind == ".safetensors":
        _write_safetensors(out, encoded, model)
    elif kind == ".npy":
        with out.open("wb") as file:  # by path, numpy would append .npy to .NPY
            np.save(file, encoded[0].embedding.numpy())
    else:
        return _write_folder(out, encoded)
    return list(encoded), []


def _write_safetensors(out: Path, encoded: Sequence[Encoded], model: Model) -> None:
    from safetensors import SafetensorError  # noqa: PLC0415  # only this format needs it
    from safetensors.numpy import save_file  # noqa: PLC0415  # as above

    metadata = {"model_id": model.model_id, "weights_fingerprint": model.weights_fingerprint}
    if model.pooling != "none":
        metadata["pooling"] = model.pooling
    try:
        save_file({each.name: each.embedding.numpy() for each in encoded}, out, metadata)
    except SafetensorError as error:
        raise OSError(f"{out} cannot be written: {error}") from error


def _write_folder(out: Path, encoded: Sequence[Encoded]) -> tuple[list[Encoded], list[Failed]]:
    written: list[Encoded] = []
    failed: list[Failed] = []
    for each in encoded:
        file = out / f"{each.name}.npy"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            np.save(file, each.embedding.numpy())
        except OSError as error:
            failed.append(Failed.of(each.position, each.file, f"its embedding cannot be written: {error}"))
        else:
            written.append(each)
    return written, failed


def _kind(out: Path) -> str:
    """The suffix in lower case, empty for a directory."""
    return "" if out.is_dir() else out.suffix.lower()
