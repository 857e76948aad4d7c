"""Files that `vitwire encode` finds, reads into items, and writes.

Reading a named pipe has a timeout, as it may never be written to.
"""

import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, TypeAlias

import numpy as np

from vitwire import Embedding, InvalidItem, Item, Model, VitwireError
from vitwire._inputs.sources import is_url
from vitwire.shared.file_kinds import HEAD_BYTES, NOT_HEIC, kind_of

_THREADS = 8
_CHUNK = 1 << 20

_IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".avif", ".tif", ".tiff", ".ico", ".jp2", ".j2k")
_SUFFIXES = frozenset((*_IMAGES, ".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".m2ts"))
_NAMES = {"webp": "WebP", "webm": "WebM", "jpeg2000": "JPEG 2000", "mpeg_ts": "MPEG-TS"}
"""Names of formats that are not written in capitals."""

Read: TypeAlias = Item | InvalidItem | OSError


def found(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """The files among the paths and in folders among them, and a name for each.

    In folders and the folders within, files with the suffix of an image or of a clip are taken. A name is the file's
    path from the deepest folder that has them all. Raises ValueError for a folder without such files, and for a URL.
    """
    files: list[Path] = []
    parents: list[str] = []
    for path in paths:
        if is_url(path):
            raise ValueError(f"{path} is a URL, and the client fetches none: download it first")
        whole = os.path.normpath(path.absolute())
        within = _within(path) if _is(path.is_dir) else [path]
        if not within:
            raise ValueError(f"{path} has no files with the suffixes {', '.join(sorted(_SUFFIXES))}")
        files += within
        parents.append(whole if within != [path] else os.path.dirname(whole))  # noqa: PTH120  # of a normal path
    root = os.path.commonpath(parents)
    return files, [os.path.relpath(file, root) for file in files]


def _within(folder: Path) -> list[Path]:
    """Files in a folder and its folders, in the order of their names; hidden ones are left out."""
    files: list[Path] = []
    for name, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        files += [
            Path(name, each) for each in sorted(names) if Path(each).suffix.lower() in _SUFFIXES and each[0] != "."
        ]
    return files


def read(files: Sequence[Path], model: Model, timeout: float) -> Iterator[Read]:
    """The item of each file, in order, or its error. Pipes must be closed by their writers within `timeout`."""
    with ThreadPoolExecutor(_THREADS) as pool:
        # Pipes are read in this thread, so that Ctrl-C can interrupt the read.
        tasks = [None if _is(file.is_fifo) else pool.submit(_item, file, model) for file in files]
        for file, task in zip(files, tasks, strict=True):
            yield task.result() if task else _piped(file, model, timeout)


def check_decodes(model: Model) -> None:
    """Raises ValueError for a server that takes no files."""
    if not model.encodings:
        raise ValueError(
            f"this server decodes no files: {model.model_type} takes only its processor's output, or "
            "the server runs with --decode-processes 0"
        )


def _item(file: Path, model: Model) -> Read:
    """The file as it is, once its first bytes and its size are known to be accepted."""
    try:
        with file.open("rb") as opened:
            head, size = opened.read(HEAD_BYTES), os.fstat(opened.fileno()).st_size
        if not head:
            return InvalidItem(f"{file}: is empty")
        if (kind := kind_of(head)) == "heic":
            return InvalidItem(f"{file}: is {NOT_HEIC}")
        if kind not in model.encodings:
            accepted = ", ".join(_NAMES.get(each, each.upper()) for each in model.encodings)
            return InvalidItem(f"{file}: not of a format that this server decodes: {accepted}")
        if size > model.limits.encoded_bytes:
            return InvalidItem(f"{file}: {size} bytes exceed the server's limit of {model.limits.encoded_bytes}")
        return Item.from_file(file)
    except (InvalidItem, OSError) as error:
        return error


def _piped(file: Path, model: Model, timeout: float) -> Read:
    try:
        with NamedTemporaryFile(prefix="vitwire-") as copy:
            _copy(file, copy, timeout)
            copy.flush()
            item = _item(Path(copy.name), model)
            return InvalidItem(str(item).replace(copy.name, str(file))) if isinstance(item, InvalidItem) else item
    except OSError as error:
        return error


def _copy(file: Path, copy: IO[bytes], timeout: float) -> None:
    """Copy the pipe's content. Raises TimeoutError if its writers do not close it in time."""
    deadline = time.monotonic() + timeout
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as pipe:
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            chunk = pipe.read(_CHUNK)  # None if another reader was faster
            if chunk == b"":
                return
            copy.write(chunk or b"")
            if time.monotonic() > deadline:
                break
    raise TimeoutError(f"{file}: the pipe was not closed by its writers within {timeout:g} s")


def _is(kind: Callable[[], bool]) -> bool:
    """Whether a path is of a kind; a path that cannot be looked up is not."""
    with suppress(OSError):
        return kind()
    return False


# -- written ---------------------------------------------------------------------------------------


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
