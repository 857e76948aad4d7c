"""A process that handles what clients sent cannot reach other processes, write files or start programs.

For Linux. The filter of system calls holds whatever the process's user and capabilities are.
"""

import ctypes
import errno
import os
import platform
import resource
import signal
import struct

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_FILTER = 2
"""SECCOMP_MODE_FILTER."""
_CAPABILITIES = 0x20080522
"""_LINUX_CAPABILITY_VERSION_3."""
_NOBODY = 65534
_FORBIDDEN = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "execve": (59, 221),
    "execveat": (322, 281),
}
"""Numbers of system calls on x86-64 and ARM."""
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By machine: its column in _FORBIDDEN and its AUDIT_ARCH."""
_X32 = 0x40000000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _MACHINE_AT = 0, 4
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000


def confine(parent: int, *, other_user: bool) -> None:
    """Confine this process, which ends with process `parent`. Raises OSError.

    With `other_user`, a process of root goes on as nobody; sharing CUDA memory was only seen within a user.
    """
    os.chdir("/")
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    if other_user and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    libc = ctypes.CDLL(None, use_errno=True)
    header, none = struct.pack("=Ii", _CAPABILITIES, 0), bytes(24)
    _checked(libc.capset(header, none))
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))
    _refuse_calls(libc)
    dies_with(parent)  # which a change of user would forget


def dies_with(parent: int) -> None:
    """End this process with the thread of process `parent` that started it. Raises OSError."""
    _checked(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0))
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def _refuse_calls(libc: ctypes.CDLL) -> None:
    if platform.machine() not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no sandbox for {platform.machine()}")
    column, machine = _MACHINES[platform.machine()]
    numbers = [each[column] for each in _FORBIDDEN.values()]
    program = [(_LOAD, 0, 0, _MACHINE_AT), (_IF_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _KILL)]
    program += [(_LOAD, 0, 0, _NUMBER_AT), (_IF_AT_LEAST, len(numbers) + 1, 0, _X32)]
    program += [(_IF_EQUAL, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in program))
    described = struct.pack("@HP", len(program), ctypes.addressof(filters))
    _checked(libc.prctl(_PR_SET_SECCOMP, _FILTER, described, 0, 0))


def _checked(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
