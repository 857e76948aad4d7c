"""Where the seconds of a suite go, by file: `make test FLAGS="-p suite_profile"`.

Seconds of wall clock and of processors (the worker and all processes that its tests started), and servers started.
"""

import json
import os
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

import servers

_SHOWN = 60
_FILE = "SUITE_PROFILE"


class Reading(NamedTuple):
    """Counters of this worker."""

    wall: float
    processor: float
    starts: int

    @classmethod
    def now(cls) -> "Reading":
        """A process that has ended is counted by the one that waited for it."""
        processor = 0.0
        this = psutil.Process()
        for process in (this, *this.children(recursive=True)):
            try:
                processor += sum(process.cpu_times()[:4])  # user and system, of itself and of children that ended
            except psutil.Error:  # it ended meanwhile
                continue
        return cls(time.monotonic(), processor, servers.starts)


_began: dict[Path, Reading] = {}


def pytest_configure() -> None:
    """Workers inherit the name of the file."""
    os.environ.setdefault(_FILE, tempfile.mkstemp(prefix="suite-profile-")[1])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Note what a file took once its last test is over."""
    if item.path not in _began:
        _began[item.path] = Reading.now()
    result = yield
    if nextitem is None or nextitem.path != item.path:
        took = [after - before for after, before in zip(Reading.now(), _began[item.path], strict=True)]
        with Path(os.environ[_FILE]).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps([os.path.relpath(item.path), *took]) + "\n")
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The files that take most of the processors' time."""
    text = Path(os.environ[_FILE]).read_text(encoding="utf-8")
    rows = sorted((json.loads(line) for line in text.splitlines()), key=lambda row: -row[2])
    total = [sum(row[at] for row in rows) for at in (1, 2, 3)]
    terminalreporter.section("seconds of wall clock, seconds of processors, servers started")
    for name, wall, processor, starts in [["all", *total], *rows[:_SHOWN]]:
        terminalreporter.line(f"{wall:8.1f} {processor:8.1f} {starts:4.0f}  {name}")
