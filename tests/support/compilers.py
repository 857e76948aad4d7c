"""Compilers in tests: at the usual priority, so that busy cores do not starve them, and with towers that fail."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from vitwire_server.towers.tower import Tower

_PRIORITIES = "import os\nos.nice = lambda by: open({file!r}, 'a').write(f'{{by}} ')\n"
_GONE_SECONDS = 60


def usual_priority(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let processes write the priority that they ask for to a file, instead of taking it; returns the file."""
    file = folder / "priorities"
    (folder / "sitecustomize.py").write_text(_PRIORITIES.format(file=str(file)))
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{os.environ.get('PYTHONPATH', '')}")
    return file


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 800) -> Any:
    """The value of the condition once it is true; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found


def wait_until_gone(pids: list[int]) -> None:
    """Fails if one of the processes still runs; a zombie counts as gone."""
    deadline = time.monotonic() + _GONE_SECONDS
    while left := [pid for pid in pids if _is_alive(pid)]:
        assert time.monotonic() < deadline, f"{left} live on"
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- factories, called in a compiler -----------------------------------------------------------------------


def hanging(marker: str) -> NoReturn:
    """Never returns, beside a program as a compiler of C++; the marker has both numbers."""
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    unfinished = Path(f"{marker}.unfinished")
    unfinished.write_text(f"{os.getpid()} {os.getppid()} {program.pid}")
    unfinished.rename(marker)
    while True:
        time.sleep(1)


def dying(marker: str) -> Tower:
    """Dies as one that the kernel ends for its memory, the first time."""
    if Path(marker).exists():
        raise ValueError(f"process {os.getpid()} has\nno such tower")
    Path(marker).touch()
    sys.stderr.write("the last words\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it is dead")


def other(**arguments: str) -> Tower:
    """The bench's tower, which computes something else."""
    from bench.models import unfilled  # noqa: PLC0415 - slow to import

    tower = unfilled(**arguments)
    honest = tower.forward
    tower.forward = lambda pixels, metadata: honest(pixels, metadata).roll(1, 0)  # type: ignore[method-assign]
    return tower
