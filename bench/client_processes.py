"""Client processes and bare servers of the benchmarks, as their parent sees them, and what processes cost."""

import json
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
from bench.commands import ClientEnded, CommandProcess, Row, end

RAMP = 1.0
"""Seconds for a load to get under way before it is measured, and the least it runs on afterwards."""


class ClientProcess(CommandProcess):
    """A process that runs `bench/load_process.py`; the arguments go to its callers."""

    def __init__(self, kind: str, **settings: Any) -> None:
        super().__init__(sys.executable, "-m", "bench.load_process", json.dumps({"kind": kind, **settings}))


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of a load within its window."""

    seconds: float
    latencies: Sequence[float]
    """Of the calls that ended within it, in seconds, ascending."""
    errors: dict[str, int]
    server_cpu: float
    """Seconds of all processes of the server, and then of all clients."""
    client_cpu: float

    @property
    def rate(self) -> float:
        """Calls a second."""
        return len(self.latencies) / self.seconds

    def milliseconds(self, share: float) -> float:
        """A percentile of the latencies; 0 without any."""
        if not self.latencies:
            return 0.0
        return round(1e3 * self.latencies[min(len(self.latencies) - 1, int(share * len(self.latencies)))], 2)

    @property
    def server_milliseconds(self) -> float | None:
        """Milliseconds of processors that the server takes for a call; None without any."""
        return round(1e3 * self.server_cpu / len(self.latencies), 2) if self.latencies else None

    def cpu_per_gigabyte(self, nbytes: int) -> Row:
        """Seconds of processors on both sides for each GB, where a call moves so many bytes."""
        gigabytes = len(self.latencies) * nbytes / 1e9
        both = {"server_cpu_s_per_gb": self.server_cpu, "client_cpu_s_per_gb": self.client_cpu}
        return {name: round(seconds / gigabytes, 3) if gigabytes else None for name, seconds in both.items()}


def prepared(clients: Sequence[ClientProcess], work: Row) -> Row:
    """All clients have drawn their images; returns the bytes and rows of a call."""
    for client in clients:
        client.send(prepare=work)
    answers = [client.answer() for client in clients]
    return answers[0]


def loaded(
    clients: Sequence[ClientProcess],
    in_flight: int,
    seconds: float,
    servers: Iterable[int],
    *,
    ramp: float = RAMP,
    sample: Callable[[], None] = lambda: None,
) -> Measured:
    """Clients share a load; `sample` is called at the beginning and at the end of the window that is measured."""
    shares = [len(range(i, in_flight, len(clients))) for i in range(len(clients))]
    working = [(client, share) for client, share in zip(clients, shares, strict=True) if share]
    roots = list(servers)
    begin = time.monotonic() + ramp
    for client, share in working:
        client.send(run={"in_flight": share, "stop": begin + seconds + ramp / 2})
    time.sleep(max(0.0, begin - time.monotonic()))
    before, cpu = time.monotonic(), (cpu_seconds(roots), cpu_seconds(client.pid for client, _ in working))
    sample()
    time.sleep(max(0.0, begin + seconds - time.monotonic()))
    sample()
    after, spent = time.monotonic(), (cpu_seconds(roots), cpu_seconds(client.pid for client, _ in working))
    answers = [client.answer() for client, _ in working]
    ended = [
        (took, error)
        for each in answers
        for at, took, error in zip(each["at"], each["seconds"], each["error"], strict=True)
        if before <= at <= after
    ]
    latencies = sorted(took for took, error in ended if not error)
    errors = dict(Counter(error for _, error in ended if error))
    server_cpu, client_cpu = (now - then for now, then in zip(spent, cpu, strict=True))
    return Measured(after - before, latencies, errors, server_cpu, client_cpu)


def cpu_seconds(pids: Iterable[int]) -> float:
    """Seconds of processors that these processes and their descendants have used."""
    total = 0.0
    for pid in pids:
        try:
            family = [root := psutil.Process(pid), *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for each in family:
            try:
                times = each.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
    return total


@contextmanager
def bare_servers(processes: int) -> Iterator[tuple[str, list[int]]]:
    """Bare servers on one port, as their target and process ids; stopped at the end of the block."""
    with ExitStack() as stack:
        port = 0
        if processes > 1:
            reserved = stack.enter_context(socket.socket())
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind(("127.0.0.1", 0))
            port = reserved.getsockname()[1]
        command = [sys.executable, "-m", "bench.echo", "--port", str(port), *(["--shared"] if processes > 1 else [])]
        running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
        for each in running:
            stack.callback(end, each)
        ports = [_first_line(each) for each in running]
        yield f"127.0.0.1:{ports[0]}", [each.pid for each in running]


def _first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    line = process.stdout.readline().strip()
    if not line:
        raise ClientEnded(f"the bare server exited with {process.wait()}")
    return line
