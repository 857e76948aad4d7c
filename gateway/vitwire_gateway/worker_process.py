"""A process that does jobs for `workers`. Its memory and processor time are limited, as what it reads is untrusted."""

import ctypes
import importlib
import mmap
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import msgspec

from vitwire_gateway.api_errors import ApiError

_PR_SET_PDEATHSIG = 1
_MAX_MESSAGE = 500
_LENGTH = struct.Struct("!Q")


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
    importlib.import_module(module)
    with socket.socket(fileno=int(end)) as link, link.makefile("rb") as received:
        _limit(int(memory))
        _send(link, None)
        while size := received.read(_LENGTH.size):
            job, length, arguments = pickle.loads(received.read(*_LENGTH.unpack(size)))  # noqa: S301  # trusted
            blob = received.read(length)
            signal.setitimer(signal.ITIMER_PROF, float(seconds))  # the kernel ends the process after it
            try:
                answer = job(blob, *arguments)
            except ApiError as error:
                answer = replace(error, message=error.message[:_MAX_MESSAGE])
            except MemoryError:
                answer = ApiError(400, "reading it takes more memory than allowed", "too_costly")
            signal.setitimer(signal.ITIMER_PROF, 0)
            _send(link, answer)
    sys.exit(0)


def _send(link: socket.socket, answer: object) -> None:
    try:
        content = msgspec.msgpack.encode(answer)
    except UnicodeEncodeError:
        content = msgspec.msgpack.encode(ApiError(400, "the request has half of a surrogate pair", "invalid_json"))
    link.sendall(_LENGTH.pack(len(content)))
    link.sendall(content)


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
