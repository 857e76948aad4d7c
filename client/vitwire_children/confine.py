"""Confinement of child processes that read what strangers send, by the kernel; see `confine`.

On Linux. Standard library only: server and gateway use it.
"""

import ctypes
import errno
import logging
import mmap
import os
import platform
import resource
import signal
import struct
import sys
from contextlib import suppress
from enum import Enum, auto
from functools import cache
from pathlib import Path

PARENT = "VITWIRE_PARENT_PID"
"""The variable by which `spawn` gives a child the id of its parent."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CAPABILITIES = 0x20080522
"""_LINUX_CAPABILITY_VERSION_3."""
_NEEDED = 0b11100000
"""CAP_KILL, which the parent needs too to end a process of another user, CAP_SETGID and CAP_SETUID."""
_NOBODY = 65534

_COMPUTING = {
    "read": (0, 63), "write": (1, 64), "writev": (20, 66), "close": (3, 57), "fstat": (5, 80), "recvfrom": (45, 207),
    "sendto": (44, 206), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216),
    "madvise": (28, 233), "brk": (12, 214), "futex": (202, 98), "set_robust_list": (273, 99), "rseq": (334, 293),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "getcpu": (309, 168), "membarrier": (324, 283),
    "exit": (60, 93), "exit_group": (231, 94), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "sigaltstack": (131, 132), "restart_syscall": (219, 128), "setitimer": (38, 103),
    "gettimeofday": (96, 169), "time": (201, None), "clock_gettime": (228, 113), "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101), "getrandom": (318, 278), "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178),
}  # fmt: skip
"""All calls of a process that only computes, with their numbers on x86-64 and ARM: memory, threads, its own clock and
signals, and descriptors that it has."""
_REACHING = {
    "execve": (59, 221), "execveat": (322, 281), "fork": (57, None), "vfork": (58, None), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kill": (62, 129), "tkill": (200, 130),
    "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "shmget": (29, 194),
    "shmat": (30, 196), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38),
    "renameat2": (316, 276), "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36),
    "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "mknod": (133, None), "mknodat": (259, 33),
    "truncate": (76, 45), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None),
    "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "setns": (308, 268),
    "unshare": (272, 97), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "personality": (135, 92), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "ftruncate": (77, 46),
}  # fmt: skip
"""Calls that reach other processes, other programs, and names of files."""
_OF_DRIVERS = "unlink", "unlinkat"
"""Calls that CUDA makes to share memory: a sender ended where they were refused."""
_OPENING = {
    "open": (2, None), "openat": (257, 56), "creat": (85, None), "socket": (41, 198), "connect": (42, 203),
    "bind": (49, 200), "listen": (50, 201), "accept": (43, 202), "accept4": (288, 242), "sendmmsg": (307, 269),
    "memfd_create": (319, 279), "socketpair": (53, 199),
}  # fmt: skip
"""Calls that open files and connections."""
_OF_FILES = "open", "openat"
_CLONE, _CLONE_THREAD = (56, 220), 0x10000
_LIMITS = 302, 261
"""prlimit64, which is for other processes too unless its first argument is 0."""
_OWNED = {(72, 25): (8, 15), (16, 29): (0x8901, 0x8902)}
"""fcntl and ioctl, with commands by which signals of a descriptor go to any process of the user: F_SETOWN and its like.
"""
_FIRST_REFUSED = 424
"""Calls that are newer than Linux 5.0 have the same numbers everywhere: io_uring, pidfd, openat2 and clone3, without
which libraries use the older ones. The numbers of x32 are beyond them too."""
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By machine: its column above and its AUDIT_ARCH."""
_SECCOMP = (317, 277)
_SET_FILTER, _ALL_THREADS, _SPECULATING = 1, 1, 4
"""SECCOMP_SET_MODE_FILTER, and its flags. Newer kernels let confined processes speculate as others do without being
asked."""
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _MACHINE_AT, _FIRST_AT, _SECOND_AT = 0, 4, 16, 24
_ALLOW, _REFUSE, _UNKNOWN, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS, 0x80000000


class May(Enum):
    """What a confined process may do with the kernel's help."""

    COMPUTE = auto()
    """Answer over the socket and in the memory that it has. It opens nothing: its modules must be imported before."""
    USE_DEVICE = auto()
    """Also call the driver of a device that it has opened before."""
    OPEN = auto()
    """Also open files, as NVDEC's driver does for each stream; `landlock` says which."""
    SEND = auto()
    """Also open files and connections, as drivers and libraries of networks do at any time."""


def confine(parent: int, may: May, *, memory: int | None = None, other_user: bool = True) -> None:
    """Confine this process, with all of its threads, which ends with process `parent`.

    It may use `memory` more bytes from now on; it is the first that the kernel ends where memory runs out. It can
    neither write files nor leave core dumps, cannot start programs or processes, nor reach those of its user. With
    `other_user`, a process that may change its user goes on as nobody. Raises OSError if the kernel has no filter of
    system calls; all else holds then.
    """
    os.chdir("/")
    if memory is not None and sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * mmap.PAGESIZE + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, f"there is no confinement on {sys.platform}")
    if other_user:
        _become_nobody()
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.capset(struct.pack("=Ii", _CAPABILITIES, 0), bytes(24)))
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    be_private()
    dies_with(parent)  # which a change of user would forget
    _filter_calls(libc, may)


def confined(parent: int, may: May, memory: int | None = None) -> str:
    """As `confine`, but where the kernel has no filter of system calls, the process goes on; returns the fault then."""
    try:
        confine(parent, may, memory=memory)
    except OSError as error:
        return str(error)
    return ""


@cache
def warn(log: logging.Logger, fault: str) -> None:
    """Log once that a process is not confined."""
    log.warning("processes that read what callers send can make any system call: %s", fault)


def be_private() -> None:
    """Keep this process's memory from other processes of its user, debuggers, profilers and core dumps."""
    if sys.platform == "linux":
        _checked(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))


def dies_with(parent: int) -> None:
    """End this process with the thread of process `parent` that started it. Raises OSError."""
    if sys.platform == "linux":
        _checked(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0))
        if os.getppid() != parent:  # it ended before
            os._exit(1)


def end_with_parent() -> int:
    """End with the process that started this one by `spawn`, even while this one is stopped or blocked (on Linux).

    Returns the parent's id. Raises OSError.
    """
    parent = int(os.environ.pop(PARENT))
    dies_with(parent)
    return parent


def ignore_signals() -> None:
    """Leave it to the parent when to stop."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _become_nobody() -> None:
    capabilities = int(Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0], 16)
    if capabilities & _NEEDED == _NEEDED:
        with suppress(OSError):  # a namespace without this user
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def _filter_calls(libc: ctypes.CDLL, may: May) -> None:
    if platform.machine() not in _MACHINES:
        raise OSError(errno.ENOSYS, f"there is no confinement on {platform.machine()}")
    column, machine = _MACHINES[platform.machine()]
    sending = {name: each for name, each in _REACHING.items() if name not in _OF_DRIVERS}
    opening = {name: each for name, each in _OPENING.items() if name not in _OF_FILES}
    listed = {May.COMPUTE: _COMPUTING, May.USE_DEVICE: _REACHING | _OPENING, May.OPEN: _REACHING | opening}
    listed |= {May.SEND: sending}
    numbers = [number for each in listed[may].values() if (number := each[column]) is not None]
    ends = (_REFUSE, _ALLOW) if may is May.COMPUTE else (_ALLOW, _REFUSE)
    program = [(_LOAD, 0, 0, _MACHINE_AT), (_IF_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _KILL)]
    program += [(_LOAD, 0, 0, _NUMBER_AT), (_IF_AT_LEAST, 0, 1, _FIRST_REFUSED), (_RETURN, 0, 0, _UNKNOWN)]
    program += [(_IF_EQUAL, 0, 4, _CLONE[column]), (_LOAD, 0, 0, _FIRST_AT), (_IF_BITS, 0, 1, _CLONE_THREAD)]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    program += [(_IF_EQUAL, 0, 4, _LIMITS[column]), (_LOAD, 0, 0, _FIRST_AT), (_IF_EQUAL, 1, 0, 0)]
    program += [(_RETURN, 0, 0, _REFUSE), (_LOAD, 0, 0, _NUMBER_AT)]
    for call, commands in _OWNED.items():
        program += [(_IF_EQUAL, 0, 5, call[column]), (_LOAD, 0, 0, _SECOND_AT), (_IF_EQUAL, 1, 0, commands[0])]
        program += [(_IF_EQUAL, 0, 1, commands[1]), (_RETURN, 0, 0, _REFUSE), (_LOAD, 0, 0, _NUMBER_AT)]
    program += [(_IF_EQUAL, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    program += [(_RETURN, 0, 0, end) for end in ends]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in program))
    described = struct.pack("@HP", len(program), ctypes.addressof(filters))
    _checked(libc.syscall(_SECCOMP[column], _SET_FILTER, _ALL_THREADS | _SPECULATING, described))


def _checked(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
