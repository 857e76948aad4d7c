"""How child processes are started: with the variables and descriptors that they are given, in a process group.

They first call `confine.end_with_parent`. Standard library only.
"""

import os
import socket
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from vitwire_children.confine import PARENT

_KEPT = ("PATH", "LANG", "LC_ALL", "HOME", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
LISTENER = "VITWIRE_LISTENER"
"""The variable by which a child gets the descriptor of a socket that listens for it."""
OF_DEVICES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""Variables that decide which device an index means."""


def program(module: str, *arguments: object) -> list[str]:
    """The command that runs a module."""
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]


def environment(*kept: str) -> dict[str, str]:
    """The variables of these names, and those that Python needs, for one thread: no token and no key."""
    return {name: os.environ[name] for name in (*_KEPT, *kept) if name in os.environ} | _ONE_THREAD


def is_open(link: socket.socket) -> bool:
    """Whether the other end of a socket is open: False once its process has ended, even if that was not reaped."""
    try:
        return bool(link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False


@contextmanager
def connected(kind: int = socket.SOCK_STREAM) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Our end of a connection, closed if the block fails, and a child's, closed after the block. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    ours.setblocking(False)
    with theirs, ExitStack() as failed:
        failed.enter_context(ours)
        yield ours, theirs
        failed.pop_all()


def options(variables: Mapping[str, str], descriptors: Sequence[int]) -> dict[str, Any]:
    """For Popen and asyncio: a child that inherits these descriptors, under the same numbers, and no output."""
    return {
        "stdin": DEVNULL,
        "stdout": DEVNULL,
        "stderr": DEVNULL,
        "env": {**variables, PARENT: str(os.getpid())},
        "pass_fds": descriptors,
        "process_group": 0,  # Ctrl-C reaches only the parent, which drains first
    }
