"""Which files a child process can open, by Linux's Landlock (5.13 and later). Standard library only."""

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Iterable
from pathlib import Path

_CREATE, _ADD, _RESTRICT = 444, 445, 446
"""System calls, which have the same numbers everywhere."""
_BENEATH = 1
"""LANDLOCK_RULE_PATH_BENEATH."""
_ALL, _OF_FILES, _READING = (1 << 13) - 1, 0b111, 0b1101
"""Rights of the first version: all, those that a file can have, and to execute, read and list."""
_MOVING = 1 << 13
"""To move files between folders: without it, and in the first version (before Linux 5.19), nobody may."""
_NO_NEW_PRIVS = 38


def bind(read: Iterable[str], write: Iterable[str]) -> None:
    """Let this thread, and those that it starts, open only these files and folders, and what is in them.

    Another call can only take away more. Paths that do not exist are left out. All are kept open: procfs forgets a
    path that nobody holds, and its rule. Raises OSError if the kernel cannot.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, f"there is no Landlock on {sys.platform}")
    libc = ctypes.CDLL(None, use_errno=True)
    everything = _ALL | (_MOVING if _checked(libc.syscall(_CREATE, None, 0, 1)) > 1 else 0)
    rules = _checked(libc.syscall(_CREATE, struct.pack("=Q", everything), 8, 0))
    for rights, paths in ((_READING, read), (everything, write)):
        for path in filter(os.path.exists, paths):
            allowed = rights if Path(path).is_dir() else rights & _OF_FILES
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            _checked(libc.syscall(_ADD, rules, _BENEATH, struct.pack("=Qi", allowed, opened), 0))
    _checked(libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(libc.syscall(_RESTRICT, rules, 0))
    os.close(rules)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock: {os.strerror(number)}")
    return result
