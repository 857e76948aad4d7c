"""The processes of a server: its own, and its edges where other processes speak gRPC for it."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
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
            found[int(inherited.split(",")[2])] = child
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


@contextmanager
def channel_to(server: ServerProcess, edge: psutil.Process, seconds: float = 60) -> Iterator[grpc.Channel]:
    """A channel whose connection this edge accepted: the kernel spreads them."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        before = _callers(edge)
        with grpc.insecure_channel(server.target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            grpc.channel_ready_future(channel).result(timeout=20)
            if _own_ports() & (_callers(edge) - before):
                yield channel
                return
    raise RuntimeError(f"no connection reached process {edge.pid} within {seconds:g} s")


def _callers(edge: psutil.Process) -> set[int]:
    """Ports at the other end of an edge's connections."""
    return {each.raddr.port for each in edge.net_connections("tcp") if each.status == psutil.CONN_ESTABLISHED}


def _own_ports() -> set[int]:
    connections = psutil.Process().net_connections("tcp")
    return {each.laddr.port for each in connections if each.status == psutil.CONN_ESTABLISHED}
