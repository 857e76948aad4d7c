"""A process that has imported what a server needs, and forks servers, which spend most of their start on imports.

`forked` is used by `servers.py` where FORK_SERVERS is 1, as in `make test`; other tiers start servers by exec.
"""

import ctypes
import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

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
        self._environment = _at_import(os.environ)
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            command = [sys.executable, "-P", __file__, str(other.fileno())]
            quiet = os.environ | {"GRPC_VERBOSITY": "NONE"}
            self._process = subprocess.Popen(command, pass_fds=[other.fileno()], env=quiet)

    def fits(self, environment: dict[str, str]) -> bool:
        """Whether a server with this environment can be forked."""
        return _at_import(environment) == self._environment

    def fork(self, arguments: Sequence[str], environment: dict[str, str], log: int) -> int:
        """The id of a new server, a child of this process."""
        message = json.dumps({"arguments": arguments, "environment": environment, "directory": str(Path.cwd())})
        socket.send_fds(self._socket, [message.encode()], [log])
        return int(self._socket.recv(64))


class ForkedServer(subprocess.Popen[bytes]):
    """A `Popen` of a server that was forked."""

    def __init__(self, zygote: Zygote, arguments: Sequence[str], environment: dict[str, str], log: IO[bytes]) -> None:
        self._fork = functools.partial(zygote.fork, arguments, environment, log.fileno())
        super().__init__([sys.executable, *arguments])

    def _execute_child(self, *_: Any) -> None:
        """What `Popen.__init__` calls to start the child."""
        self.pid = self._fork()
        self._child_created = True


@functools.cache
def zygote() -> Zygote:
    """The one of this process."""
    return Zygote()


def forked(arguments: Sequence[str], environment: dict[str, str], log: IO[bytes]) -> ForkedServer | None:
    """A server with these arguments; None if forking is off, or its environment needs imports of its own."""
    if os.environ.get("FORK_SERVERS") != "1" or "--devices" in arguments or not zygote().fits(environment):
        return None
    return ForkedServer(zygote(), arguments, environment, log)


def _at_import(environment: Any) -> dict[str, str]:
    """What imports depend on; the two variables that every server gets are set in the zygote as well."""
    own = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return {key: value for key, value in {**environment, **own}.items() if key.startswith(_READ_AT_IMPORT)}


def _serve_forks(requests: socket.socket) -> None:
    """Fork a server per message until the other end is closed."""
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, _MESSAGE_BYTES, 1)
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
                _become_server(json.loads(message), descriptors[0])
            os.write(writing, b"%d" % server)
            os._exit(0)
        os.waitpid(middle, 0)  # from here on the server is a child of the process that asked for it
        requests.send(os.read(reading, 64))
        for descriptor in (reading, writing, *descriptors):
            os.close(descriptor)


def _become_server(message: dict[str, Any], log: int) -> NoReturn:
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(message["environment"])
    os.chdir(message["directory"])
    from vitwire_server.__main__ import main  # noqa: PLC0415  # in the zygote only

    sys.argv = ["vitwire-server", *message["arguments"]]
    main(message["arguments"])
    raise AssertionError("main exits")


def _preload() -> None:
    import transformers  # noqa: F401, PLC0415  # in the zygote only

    import vitwire_server.process.edges  # noqa: PLC0415  # as above
    import vitwire_server.process.serve  # noqa: F401, PLC0415  # as above

    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends pytest, and the closed connection this process
    _preload()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        _serve_forks(connection)
