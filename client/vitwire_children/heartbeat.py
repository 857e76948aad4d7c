"""Heartbeats: one byte a second from the event loop of a child process to its supervisor, through an inherited pipe.

The supervisor is the process that started it: the server, of each process of `--devices`, of RPC, and of HTTP.

They need no port, certificate or output, and stop when the process is stopped or its event loop is blocked.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from vitwire_children.confine import end_with_parent

VARIABLE = "VITWIRE_HEARTBEAT_FD"
"""Set by the supervisor for its children: the descriptor to write to."""
SECONDS = 1.0
_MAX_BYTES = 1 << 16
T = TypeVar("T")


def inherited() -> int | None:
    """The pipe to the supervisor, removed from the environment; None without a supervisor.

    From now on the process dies with its supervisor (on Linux), even while it is stopped or blocked.
    """
    descriptor = os.environ.pop(VARIABLE, "")
    if not descriptor.isdigit():
        return None
    end_with_parent()
    os.set_inheritable(int(descriptor), False)
    os.set_blocking(int(descriptor), False)
    return int(descriptor)


async def with_heartbeat(descriptor: int | None, work: Coroutine[object, None, T]) -> T:
    """Await `work`, sending heartbeats meanwhile if there is a supervisor."""
    beating = asyncio.create_task(beat(descriptor)) if descriptor is not None else None
    try:
        return await work
    finally:
        if beating:
            beating.cancel()


async def beat(descriptor: int) -> None:
    """Send heartbeats for ever."""
    with suppress(BrokenPipeError):  # the supervisor is gone
        while True:
            with suppress(BlockingIOError):  # the supervisor is stopped, and the pipe full
                os.write(descriptor, b".")
            await asyncio.sleep(SECONDS)


async def wait_for_silence(
    pipe: BinaryIO, pid: int, seconds: float, on_first: Callable[[], None] = lambda: None
) -> str:
    """Wait until no heartbeat came through the pipe for `seconds`; returns what was wrong.

    Before the first heartbeat, while modules are imported, only a stopped process counts as silent. Seconds are
    counted by wake-ups, so none are counted while the supervisor itself is stopped or starved.
    """
    os.set_blocking(pipe.fileno(), False)
    began, silent = False, 0.0
    while silent < seconds:
        await asyncio.sleep(SECONDS)
        stopped = _is_stopped(pid)
        beats = bool(pipe.read(_MAX_BYTES))
        if beats and not began:
            on_first()
        began = began or beats
        silent = silent + SECONDS if not beats and (began or stopped) else 0.0
    return "was stopped (SIGSTOP)" if stopped else "did not respond"


def _is_stopped(pid: int) -> bool:
    """Whether job control or a debugger stopped the process; False without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"
