"""Heartbeats: one byte a second from the event loop of a child process to its supervisor, through an inherited pipe.

The supervisor is the process that started it: that of `--devices`, or the engine process of an RPC process.

They need no port, certificate or output, and stop when the process is stopped or its event loop is blocked.
"""

import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

VARIABLE = "VITWIRE_HEARTBEAT_FD"
"""Set by the supervisor for its children: the descriptor to write to."""
_SUPERVISOR = "VITWIRE_SUPERVISOR_PID"
SECONDS = 1.0
_MAX_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1
T = TypeVar("T")


def inherited() -> int | None:
    """The pipe to the supervisor, removed from the environment; None without a supervisor.

    From now on the process dies with its supervisor (on Linux), even while it is stopped or blocked.
    """
    descriptor, supervisor = os.environ.pop(VARIABLE, ""), os.environ.pop(_SUPERVISOR, "")
    if not descriptor.isdigit():
        return None
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if str(os.getppid()) != supervisor:  # it exited before prctl
            os._exit(1)
    os.set_inheritable(int(descriptor), False)
    os.set_blocking(int(descriptor), False)
    return int(descriptor)


async def with_heartbeat(descriptor: int | None, work: Coroutine[object, None, T]) -> T:
    """Await `work`, sending heartbeats meanwhile if there is a supervisor."""
    beating = asyncio.create_task(_beat(descriptor)) if descriptor is not None else None
    try:
        return await work
    finally:
        if beating:
            beating.cancel()


async def _beat(descriptor: int) -> None:
    with suppress(BrokenPipeError):  # the supervisor is gone
        while True:
            with suppress(BlockingIOError):  # the supervisor is stopped, and the pipe full
                os.write(descriptor, b".")
            await asyncio.sleep(SECONDS)


def variables(monitor: "HeartbeatMonitor") -> dict[str, str]:
    """The environment that a child needs for `inherited`."""
    return {VARIABLE: str(monitor.write_end), _SUPERVISOR: str(os.getpid())}


class HeartbeatMonitor:
    """The supervisor's end: a pipe whose write end the child process inherits, and the time without heartbeats."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._began = False
        self._silent = 0.0

    def child_started(self) -> None:
        """The child process has inherited its end: close it here."""
        os.close(self.write_end)

    async def wait_for_silence(self, pid: int, seconds: float) -> str:
        """Wait until there was no heartbeat for `seconds`; returns what was wrong.

        Before the first heartbeat, while modules are imported, only a stopped process counts as silent. Seconds are
        counted by wake-ups, so none are counted while the supervisor itself is stopped or starved.
        """
        while True:
            await asyncio.sleep(SECONDS)
            stopped = _is_stopped(pid)
            beats = self._received()
            self._began = self._began or beats
            self._silent = self._silent + SECONDS if not beats and (self._began or stopped) else 0.0
            if self._silent >= seconds:
                return "was stopped (SIGSTOP)" if stopped else "did not respond"

    def close(self) -> None:
        """Close the read end."""
        os.close(self._read_end)

    def _received(self) -> bool:
        try:
            return bool(os.read(self._read_end, _MAX_BYTES))
        except BlockingIOError:
            return False


def _is_stopped(pid: int) -> bool:
    """Whether job control or a debugger stopped the process; False without /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"
