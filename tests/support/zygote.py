"""A process that has imported what a server needs, and forks servers, which spend most of their start on imports.

`forked` is used by `servers.py` where FORK_SERVERS is 1, as in `make test`; other tiers start servers by exec.
A program that breaks a server changes names where they are used: modules have been imported before it runs.
"""

import ctypes
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

_PR_SET_CHILD_SUBREAPER = 36
_MESSAGE_BYTES = 1 << 20
_READ_AT_IMPORT = (
    "OMP_",
    "GRPC_",
    "TORCH",
    "PYTORCH",
    "HF_",
    "MALLOC",
    "CUDA",
    "TRITON",
    "PYTHON",
    "LD_",
    "MKL_",
    "KMP_",
)
"""Variables that libraries read when they are imported."""


class Zygote:
    """This process's end of the connection."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(
            _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
        ):  # servers become children of this process, not of the zygote
            raise OSError(ctypes.get_errno(), "prctl")
        self._environment = at_import(os.environ)
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            command = [sys.executable, "-P", __file__, str(other.fileno())]
            environment = os.environ | {"GRPC_VERBOSITY": "NONE", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
            self._process = subprocess.Popen(command, pass_fds=[other.fileno()], env=environment)

    def fits(self, environment: dict[str, str]) -> bool:
        """Whether a server with this environment can be forked."""
        return at_import(environment) == self._environment

    def fork(self, command: Sequence[str], environment: dict[str, str], output: int, errors: int) -> int:
        """The id of a new process, a child of this one."""
        message = json.dumps({"command": command, "environment": environment, "directory": str(Path.cwd())})
        socket.send_fds(self._socket, [message.encode()], [output, errors])
        return int(self._socket.recv(64))


class Forked(subprocess.Popen[Any]):
    """A `Popen` of a Python program that was forked."""

    def __init__(self, zygote: Zygote, command: Sequence[str], environment: dict[str, str], **streams: Any) -> None:
        self._fork = functools.partial(zygote.fork, command, environment)
        super().__init__([sys.executable, *command], **streams)

    def _execute_child(self, *words: Any) -> None:
        """What `Popen.__init__` calls to start the child."""
        pipes = words[10:16]  # both ends of stdin, stdout and stderr
        self.pid = self._fork(pipes[3], pipes[5])
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]  # private


@functools.cache
def zygote() -> Zygote:
    """The one of this process."""
    return Zygote()


def forked(
    program: Sequence[str], arguments: Sequence[str], environment: dict[str, str], **streams: Any
) -> Forked | None:
    """A program, given as to Python, with these arguments, and with both output streams redirected as by `Popen`.

    None if forking is off, or its environment needs other imports.
    """
    if os.environ.get("FORK_SERVERS") != "1" or "--devices" in arguments or not zygote().fits(environment):
        return None
    return Forked(zygote(), [*program, *arguments], environment, **streams)


def at_import(environment: Any) -> dict[str, str]:
    """The variables that imports depend on, without those that the zygote, a server or a test's client sets itself."""
    own = ("HF_HUB_OFFLINE", "PYTHONUNBUFFERED", "GRPC_VERBOSITY", "GRPC_EXPERIMENTAL_RING_HASH_SET_REQUEST_HASH_KEY")
    return {key: value for key, value in environment.items() if key.startswith(_READ_AT_IMPORT) and key not in own}


def _serve_forks(requests: socket.socket) -> None:
    """Fork a server per message until the other end is closed."""
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, _MESSAGE_BYTES, 2)
        if not message:
            return
        reading, writing = os.pipe()
        middle = os.fork()
        if not middle:
            server = os.fork()
            if not server:
                os.close(reading)
                os.close(writing)
                requests.close()
                _leave(_run(json.loads(message), *descriptors))
            os.write(writing, b"%d" % server)
            os._exit(0)
        os.waitpid(middle, 0)  # from here on the server is a child of the process that asked for it
        requests.send(os.read(reading, 64))
        for descriptor in (reading, writing, *descriptors):
            os.close(descriptor)


def _leave(code: object) -> NoReturn:
    """Exit as `sys.exit` does, without taking apart what the zygote imported, which takes tenths of a second."""
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else bool(code))


def _run(message: dict[str, Any], output: int, errors: int) -> object:
    """Run a program as a new interpreter would. Returns what it exits with."""
    os.dup2(output, 1)
    os.dup2(errors, 2)
    for descriptor in {output, errors}:
        os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  # until the end
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(message["environment"])
    os.chdir(message["directory"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _run_program(message["command"])
    except SystemExit as ended:
        return ended.code
    return None


def _run_program(command: Sequence[str]) -> None:
    match command:
        case ["-m", "vitwire_server", *arguments]:
            from vitwire_server.__main__ import main  # noqa: PLC0415  # in the zygote only

            sys.argv = ["vitwire-server", *arguments]
            main(arguments)
        case ["-c", code, *arguments]:
            sys.argv = ["-c", *arguments]
            sys.modules["__main__"] = module = ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), vars(module))
        case [script, *arguments]:
            sys.argv = [script, *arguments]
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")


def _preload() -> None:
    import transformers  # noqa: F401, PLC0415  # in the zygote only

    import vitwire_cli.app  # noqa: F401, PLC0415  # as above
    import vitwire_gateway.router.router_process  # noqa: PLC0415  # as above
    import vitwire_gateway.sglang.encoder_process  # noqa: F401, PLC0415  # as above
    import vitwire_server.process.edge_front  # noqa: PLC0415  # as above
    import vitwire_server.process.serve  # noqa: F401, PLC0415  # as above

    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends pytest, and the closed connection this process
    _preload()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        _serve_forks(connection)
