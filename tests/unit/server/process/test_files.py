"""Files that operators name: nothing that could block is opened, and what blocks all the same holds nobody up."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vitwire_flags.regular_files import append_regular, read_regular
from vitwire_server.config.settings import UsageError
from vitwire_server.process import hanging_files
from vitwire_server.process.hanging_files import read_at_start, refresh_for_ever


def pipe(path: Path) -> None:
    os.mkfifo(path)


def listener(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [pipe, listener, device, Path.mkdir])
def test_what_is_not_a_regular_file_is_refused_at_once(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "file")
    with pytest.raises(OSError, match=r"not a regular file: .*file"):
        read_regular(tmp_path / "file", 8)
    with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
        append_regular(tmp_path / "file")


def test_a_pipe_with_a_reader_is_refused_as_well(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match="not a regular file"):
        append_regular(tmp_path / "pipe")
    os.close(reader)


def test_a_file_may_be_a_link_and_has_a_bound(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345678")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 8) == b"12345678"
    with pytest.raises(OSError, match="larger than 7 bytes"):
        read_regular(tmp_path / "link", 7)
    with append_regular(tmp_path / "link") as file:
        file.write(b"9")
    assert (tmp_path / "file").read_bytes() == b"123456789"


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Path]:
    """A file whose reader waits, as on a mount that hangs, until somebody writes."""
    os.mkfifo(tmp_path / "pipe")
    yield tmp_path / "pipe"
    os.close(os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK))


async def test_a_start_does_not_wait_for_ever(hanging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hanging_files, "_SILENT_SECONDS", 0.2)
    with pytest.raises(UsageError, match=r"^--tokens: no answer from the file system for 0\.2 s$"):
        await read_at_start("--tokens", hanging.read_bytes)
    with pytest.raises(UsageError, match=r"^--tokens: .*No such file or directory: .*nothing"):
        await read_at_start("--tokens", (hanging.parent / "nothing").read_bytes)


async def test_a_file_that_hangs_is_reported_and_read_again_when_it_answers(
    hanging: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hanging_files, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(hanging_files, "_SILENT_SECONDS", 0.1)
    caplog.set_level(logging.WARNING)
    read: list[bytes] = []
    following = asyncio.create_task(refresh_for_ever("--tokens", lambda: read.append(hanging.read_bytes())))

    async def until(text: str) -> None:
        async with asyncio.timeout(30):
            while text not in caplog.text:  # noqa: ASYNC110 - a log line sets no event
                await asyncio.sleep(0.01)

    await until("--tokens: no answer from the file system; what was read before stays in use")
    writer = os.open(hanging, os.O_RDWR | os.O_NONBLOCK)
    os.write(writer, b"new")
    os.close(writer)
    await until("--tokens: the file system answers again")
    following.cancel()
