"""Run as a program: forks the processes that deliver, each in a sandbox. Does not read what clients sent.

NIXL is imported once, before the first fork, so a sender starts fast and shares most of its memory.
"""

import os
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import NoReturn

from vitwire.shared.agents import load
from vitwire_children.confine import end_with_parent, ignore_signals
from vitwire_server.delivery.messages import MAX_MESSAGE, TO_FACTORY, End
from vitwire_server.delivery.sender import serve

_REAPING_SECONDS = 1.0


def main() -> NoReturn:
    """Serve the socket whose descriptor is the first argument, until it is closed."""
    end_with_parent()
    ignore_signals()
    load()
    link = socket.socket(fileno=int(sys.argv[1]))
    children: dict[int, int] = {}
    while True:
        readable, _, _ = select.select([link], [], [], _REAPING_SECONDS)
        _reap(children)
        if not readable:
            continue
        raw, descriptors, _, _ = socket.recv_fds(link, MAX_MESSAGE, 2)
        if not raw:
            os._exit(0)
        message = TO_FACTORY.decode(raw)
        if isinstance(message, End):
            if pid := children.get(message.number):
                os.kill(pid, signal.SIGKILL)
        else:
            children[message.number] = _forked(link, *descriptors)


def _forked(link: socket.socket, end: int, memory: int) -> int:
    """The id of a new sender, with its end of a socket and the file of its staging memory."""
    factory = os.getpid()
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            link.close()
            serve(end, memory, factory)
        os._exit(1)
    os.close(end)
    os.close(memory)
    return pid


def _reap(children: dict[int, int]) -> None:
    """Forget senders that have ended, before their ids belong to other processes."""
    for number, pid in list(children.items()):
        if os.waitpid(pid, os.WNOHANG)[0]:
            del children[number]


if __name__ == "__main__":
    main()
