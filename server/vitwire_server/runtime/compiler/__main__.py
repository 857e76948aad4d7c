"""The compiler's process and its guard. Does not import torch.

The guard ends the compiler, whatever that does, and removes its files, once the server's end of their socket is closed:
after an orderly stop as after a crash of the server. The compiler dies with its guard.
"""

import ctypes
import os
import resource
import select
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

_LOWEST = 19
_MOST_SECONDS = 1800
"""Of processor time, for each process: none runs for ever. The server limits the time that passes."""
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_LOOK_MILLISECONDS = 100
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> NoReturn:
    """Compile for the socket whose descriptor is the first argument; the second is the folder to remove."""
    end, folder = int(sys.argv[1]), Path(sys.argv[2])
    for number in _SIGNALS:  # the server decides when to stop
        signal.signal(number, signal.SIG_IGN)
    guard = os.getpid()
    compiler = os.fork()
    if not compiler:
        _compile(end, guard)
    with suppress(PermissionError):  # the compiler has done it, and runs by now
        os.setpgid(compiler, compiler)
    os._exit(_guarded(compiler, end, folder))


def _compile(end: int, guard: int) -> NoReturn:
    os.setpgid(0, 0)  # the group is killed as one, with compilers of C++
    os.nice(_LOWEST)
    resource.setrlimit(resource.RLIMIT_CPU, (_MOST_SECONDS, _MOST_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        with suppress(OSError):  # where memory runs out, the kernel ends this process first
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
        if os.getppid() != guard:  # it ended before prctl
            os._exit(1)
    from vitwire_server.runtime.compiler.worker import serve  # noqa: PLC0415 - in the compiler only: torch is large

    serve(end)


def _guarded(compiler: int, end: int, folder: Path) -> int:
    """Wait until the compiler has ended, or the server's end is closed; returns the exit code of the former."""
    link = select.poll()
    link.register(end, 0)  # only that it is closed
    while not link.poll(_LOOK_MILLISECONDS):
        pid, status = os.waitpid(compiler, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            _kill(compiler)  # what it left in its group
            return code if code >= 0 else 128 - code
    _kill(compiler)
    os.waitpid(compiler, 0)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
