"""A process that does jobs for `workers`. It is confined and its time is limited, as what it reads is untrusted."""

import importlib
import json
import os
import pickle
import signal
import socket
import struct
import sys
import warnings
from typing import Any, NoReturn

from vitwire_children.confine import May, confined, dies_with
from vitwire_gateway.api_errors import ApiError

_MAX_MESSAGE = 500
_LENGTH = struct.Struct("!I")


def main() -> NoReturn:
    """Serve the socket whose descriptor is the first argument, until it is closed.

    The module that is named must import whatever jobs use: a confined process cannot.
    """
    end, parent, module, memory, seconds = sys.argv[1:6]
    dies_with(int(parent))
    for number in (signal.SIGTERM, signal.SIGINT):  # the parent decides when to stop
        signal.signal(number, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # what is read is untrusted: its oddities are not news
    importlib.import_module(module)
    os.dup2(1, 2)  # to /dev/null: what was taken over must not write, or fill, the router's log
    with socket.socket(fileno=int(end)) as link, link.makefile("rb") as received:
        _send(link, confined(int(parent), May.COMPUTE, int(memory)))
        while size := received.read(_LENGTH.size):
            job, length, arguments = pickle.loads(received.read(*_LENGTH.unpack(size)))  # noqa: S301  # trusted
            blob = received.read(length)
            signal.setitimer(signal.ITIMER_PROF, float(seconds))  # the kernel ends the process after it
            try:
                answer = job(blob, *arguments)
            except ApiError as error:
                answer = error
            except MemoryError:
                answer = ApiError(400, "reading it takes more memory than allowed", "too_costly")
            signal.setitimer(signal.ITIMER_PROF, 0)
            _send(link, answer)
    sys.exit(0)


def _send(link: socket.socket, answer: object) -> None:
    """Send an answer as JSON, and the bytes in it after that."""
    blobs: list[bytes] = []

    def outside(value: Any) -> dict[str, Any]:  # noqa: ANN401  # as json calls it
        if isinstance(value, ApiError):
            return {"error": [value.status, value.message[:_MAX_MESSAGE], value.code, value.param]}
        blobs.append(value)
        return {"bytes": len(value)}

    content = json.dumps(answer, default=outside).encode()
    link.sendall(_LENGTH.pack(len(content)) + content)
    for blob in blobs:
        link.sendall(blob)


if __name__ == "__main__":
    main()
