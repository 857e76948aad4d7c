"""Image files read into items; reading a named pipe has a timeout, as it may never be written to."""

import os
import select
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, TypeAlias

from vitwire import InvalidItem, Item, Model
from vitwire._encodings import CLIPS, HEAD_BYTES, encoding_of
from vitwire._prepare import Upload, image_items

_THREADS = 8
_CHUNK = 1 << 20

Prepared: TypeAlias = Item | InvalidItem | OSError


def prepare(files: Sequence[Path], model: Model, timeout: float, upload: Upload) -> Iterator[Prepared]:
    """The item of each file, in order, or its error. Pipes must be closed by their writers within `timeout`."""
    with ThreadPoolExecutor(_THREADS) as pool:
        # Pipes are read in this thread, so that Ctrl-C can interrupt the read.
        tasks = [None if _is_pipe(file) else pool.submit(_item, file, model, upload) for file in files]
        for file, task in zip(files, tasks, strict=True):
            yield task.result() if task else _piped(file, model, timeout, upload)


def _item(file: Path, model: Model, upload: Upload) -> Prepared:
    try:
        if upload != "pixels" and _is_clip(file):
            return Item.from_file(file)
        (item,) = image_items([file], model, upload)
    except (InvalidItem, OSError) as error:
        return error
    return item


def _is_clip(file: Path) -> bool:
    with file.open("rb") as opened:
        return encoding_of(opened.read(HEAD_BYTES)) in CLIPS


def _piped(file: Path, model: Model, timeout: float, upload: Upload) -> Prepared:
    try:
        with NamedTemporaryFile(prefix="vitwire-") as copy:
            _copy(file, copy, timeout)
            copy.flush()
            item = _item(Path(copy.name), model, upload)
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


def _is_pipe(file: Path) -> bool:
    with suppress(OSError):
        return file.is_fifo()
    return False
