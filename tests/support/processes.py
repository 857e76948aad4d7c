"""The processes of a server: its own, and its edges where other processes speak gRPC for it."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from servers import ServerProcess


def edges(server: ServerProcess) -> list[psutil.Process]:
    """Its edges by number; none where it speaks gRPC itself."""
    found = {}
    for child in psutil.Process(server.process.pid).children(recursive=True):
        try:
            environment = child.environ() if "edge" in child.cmdline() else {}
        except psutil.Error:  # it has just ended
            continue
        if inherited := environment.get("VITWIRE_EDGE"):
            found[int(inherited.split(",")[3])] = child
    return [found[number] for number in sorted(found)]


def listening(server: ServerProcess) -> set[int]:
    """Every port that one of its processes listens on."""
    processes = [psutil.Process(server.process.pid), *edges(server)]
    connections = [each for process in processes for each in process.net_connections("tcp")]
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


def memory_mib(server: ServerProcess) -> float:
    """Memory of all its processes; what they share counts once."""
    own = psutil.Process(server.process.pid)
    children = edges(server)
    if not children:
        return float(own.memory_info().rss) / (1 << 20)
    return float(sum(each.memory_full_info().pss for each in (own, *children))) / (1 << 20)


@contextmanager
def frozen(server: ServerProcess) -> Iterator[None]:
    """Stop all its processes, as on a machine that hangs."""
    numbers = [server.process.pid, *(edge.pid for edge in edges(server))]
    for number in numbers:
        os.kill(number, signal.SIGSTOP)
    try:
        yield
    finally:
        for number in numbers:
            os.kill(number, signal.SIGCONT)
