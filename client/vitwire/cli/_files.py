"""Files found and read into items; reading a named pipe has a timeout, as it may never be written to."""

import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, TypeAlias

from vitwire import InvalidItem, Item, Model
from vitwire._inputs.sources import HEAD_BYTES, encoding_of, is_url

_THREADS = 8
_CHUNK = 1 << 20

_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".mp4", ".webm"))
_NAMES = {"webp": "WebP", "webm": "WebM"}
"""Of formats that are not written in capitals."""

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
            f"this server decodes no files: {model.model_type} takes only pixels as its own processor returns them, or "
            "the server runs with --decode-processes 0"
        )


def _item(file: Path, model: Model) -> Read:
    """The file as it is, once its first bytes and its size are known to be accepted."""
    try:
        with file.open("rb") as opened:
            head, size = opened.read(HEAD_BYTES), os.fstat(opened.fileno()).st_size
        if not head:
            return InvalidItem(f"{file}: is empty")
        if encoding_of(head) not in model.encodings:
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
