"""What a process that reads strangers' bytes must not be able to do: each is tried, in that process."""

import ctypes
import errno
import fcntl
import json
import os
import resource
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from vitwire_children import confine

_LIBC = ctypes.CDLL(None, use_errno=True)
_COLUMN = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
FORGED = "a forged line"
"""Written to the standard error, which is the server's log."""
_FORKS = ("fork", "vfork", "clone")
_SETOWN_EX, _FIOSETOWN, _SIOCSPGRP = 15, 0x8901, 0x8902
NEWER = range(424, 472)
"""System calls since Linux 5.1, io_uring, openat2 and clone3 among them."""
TOKEN, OPEN_TO_ALL = "token", "open to all"
"""Files in the folder: only the server's user may read the first, and everyone may write the second."""


def prepared(folder: Path) -> None:
    """Make the files that acts need."""
    (folder / TOKEN).write_text("a secret")
    (folder / TOKEN).chmod(0o600)
    (folder / OPEN_TO_ALL).write_text("as it was")
    (folder / OPEN_TO_ALL).chmod(0o666)
    folder.chmod(0o777)


def results() -> str:
    """JSON: what came of each act, `done` or the name of an error. The folder is the variable HOME."""
    with suppress(OSError):
        os.write(2, FORGED.encode())
    return json.dumps({name: _tried(act) for name, act in (_named() | _called()).items()})


def _named() -> dict[str, Callable[[], object]]:
    server, folder = os.getppid(), Path(os.environ["HOME"])
    mine, new = folder / OPEN_TO_ALL, folder / "new"
    return {
        "read the server's memory": lambda: os.open(f"/proc/{server}/mem", os.O_RDONLY),
        "write the server's memory": lambda: os.open(f"/proc/{server}/mem", os.O_RDWR),
        "read own memory": lambda: os.open("/proc/self/mem", os.O_RDWR),
        "read the token": lambda: os.open(folder / TOKEN, os.O_RDONLY),
        "read any file": lambda: os.open("/etc/passwd", os.O_RDONLY),
        "list a folder": lambda: list(folder.iterdir()),
        "make a file": lambda: os.open(new, os.O_WRONLY | os.O_CREAT, 0o600),
        "write a file": lambda: os.open(mine, os.O_WRONLY),
        "empty a file": lambda: os.open(mine, os.O_RDWR | os.O_TRUNC),
        "append to a file": lambda: os.open(mine, os.O_WRONLY | os.O_APPEND),
        "remove a file": mine.unlink,
        "rename a file": lambda: mine.rename(new),
        "link a file": lambda: os.link(mine, new),
        "make a symbolic link": lambda: new.symlink_to(mine),
        "make a folder": new.mkdir,
        "make a pipe": lambda: os.mkfifo(new),
        "truncate a file": lambda: os.truncate(mine, 0),
        "change a mode": lambda: mine.chmod(0o600),
        "change an owner": lambda: os.chown(mine, os.getuid(), os.getgid()),
        "change a time": lambda: os.utime(mine),
        "connect": lambda: socket.create_connection(("127.0.0.1", 9), 1),
        "a socket": lambda: socket.socket(socket.AF_UNIX),
        "signal the server": lambda: os.kill(server, 0),
        "signal all": lambda: os.kill(-1, 0),
        "own signals to the server": lambda: fcntl.fcntl(0, fcntl.F_SETOWN, server),
        "own signals to it, newer": lambda: fcntl.fcntl(0, _SETOWN_EX, struct.pack("ii", 1, server)),
        "own signals of a socket": lambda: fcntl.ioctl(0, _FIOSETOWN, struct.pack("i", server)),
        "own signals of a socket, older": lambda: fcntl.ioctl(0, _SIOCSPGRP, struct.pack("i", server)),
        "limit the server": lambda: resource.prlimit(server, resource.RLIMIT_CPU, (1, 1)),
        "slow the server": lambda: os.setpriority(os.PRIO_PROCESS, server, 19),
        "bind the server to a core": lambda: os.sched_setaffinity(server, {0}),
        "fork": _forked,
        "start a program": lambda: os.execv("/bin/true", ["true"]),
        "become root": lambda: os.setresuid(0, 0, 0),
        "anonymous memory with a name": lambda: os.memfd_create("mine"),
    }


def _called() -> dict[str, Callable[[], object]]:
    """All that are refused to processes with a device, and newer ones, with arguments that are not valid."""
    calls = {name: each[_COLUMN] for name, each in (confine._REACHING | confine._OPENING).items()}
    numbers = {name: number for name, number in calls.items() if number is not None}
    numbers |= {f"number {number}": number for number in NEWER}
    numbers |= {"clone": confine._CLONE[_COLUMN]}
    return {name: partial(_call, number, forks=name in _FORKS) for name, number in numbers.items()}


def _call(number: int, *, forks: bool) -> None:
    found = _LIBC.syscall(ctypes.c_long(number), *[ctypes.c_long(0)] * 6)
    if found == 0 and forks:
        os._exit(0)
    if found < 0:
        raise OSError(ctypes.get_errno(), "")


def _forked() -> None:
    if not os.fork():
        os._exit(0)


def _tried(act: Callable[[], object]) -> str:
    try:
        act()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return "done"
