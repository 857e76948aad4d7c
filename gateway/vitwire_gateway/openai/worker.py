"""A process that does jobs for `workers`. Its memory and processor time are limited, as what it reads is untrusted."""

import ctypes
import importlib
import json
import mmap
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from vitwire_gateway.openai.errors import ApiError

Job = Callable[..., tuple[dict[str, Any], Sequence[bytes]]]
"""Takes arguments by name and `blobs`, a list of bytes; returns JSON and bytes. Raises ApiError."""

_PR_SET_PDEATHSIG = 1
_MAX_MESSAGE = 500
_LENGTH = struct.Struct("!I")


def main() -> NoReturn:
    """Serve the socket whose descriptor is the first argument, until it is closed."""
    end, parent, module, memory, seconds = sys.argv[1:6]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != int(parent):  # it ended before prctl
            sys.exit(1)
    for number in (signal.SIGTERM, signal.SIGINT):  # the parent decides when to stop
        signal.signal(number, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # what is read is untrusted: its oddities are not news
    jobs: dict[str, Job] = importlib.import_module(module).JOBS
    with socket.socket(fileno=int(end)) as link, link.makefile("rb") as received:
        _limit(int(memory))
        _send(link, {"answer": {}}, ())
        while length := received.read(_LENGTH.size):
            (name, arguments), lengths = pickle.loads(received.read(*_LENGTH.unpack(length)))  # noqa: S301  # trusted
            blobs = [received.read(each) for each in lengths]
            signal.setitimer(signal.ITIMER_PROF, float(seconds))  # the kernel ends the process after it
            answer = _answer(jobs[name], arguments, blobs)
            signal.setitimer(signal.ITIMER_PROF, 0)
            _send(link, *answer)
    sys.exit(0)


def _answer(job: Job, arguments: dict[str, Any], blobs: list[bytes]) -> tuple[dict[str, Any], Sequence[bytes]]:
    try:
        head, returned = job(**arguments, blobs=blobs)
    except ApiError as error:
        return _refusal(error), ()
    except MemoryError:
        return _refusal(ApiError(400, "it takes more memory to read than it may", "too_costly")), ()
    return {"answer": head}, returned


def _refusal(error: ApiError) -> dict[str, Any]:
    fields = {"status": error.status, "message": error.message[:_MAX_MESSAGE], "code": error.code, "param": error.param}
    return {"error": fields}


def _send(link: socket.socket, head: dict[str, Any], blobs: Sequence[bytes]) -> None:
    content = json.dumps(head | {"lengths": [len(each) for each in blobs]}).encode()
    link.sendall(_LENGTH.pack(len(content)) + content)
    for blob in blobs:
        link.sendall(blob)


def _limit(memory: int) -> None:
    """Limit what the process may use from now on: so much more memory, and no files or core dumps."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * mmap.PAGESIZE + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        Path("/proc/self/oom_score_adj").write_text("1000")  # the kernel ends this process before its parent
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


if __name__ == "__main__":
    main()
