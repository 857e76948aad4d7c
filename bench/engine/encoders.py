"""The Vitwire servers of the benchmark: one on each of the encoders' devices."""

import argparse
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.engine import checkpoint

from servers import PYTHON, ServerProcess, end, serving

_FIRST_PORT, _LAST_PORT = 20000, 32000
"""Below those that Linux gives to outgoing connections."""


@dataclass(frozen=True, slots=True)
class Encoders:
    """Servers, in the order of their devices."""

    servers: list[ServerProcess]

    def wait(self, seconds: float) -> None:
        """Until all are ready. Raises RuntimeError if that takes longer, or a server ends."""
        deadline = time.monotonic() + seconds
        for server in self.servers:
            server.wait_for("ready: ", max(1.0, deadline - time.monotonic()))

    def keep(self, count: int) -> None:
        """Only the last ones go on; clients that know all of them by affinity then use those."""
        while len(self.servers) > count:
            end(self.servers.pop(0).process)

    def busy_seconds(self) -> float:
        """Seconds of computation on all devices so far."""
        return sum(server.metric("vitwire_stage_seconds_sum", stage="execute") for server in self.servers)


@contextmanager
def starting(
    model: Path, devices: Sequence[str], flags: Sequence[str], wrapper: Sequence[str]
) -> "Iterator[tuple[str, Future[Encoders]]]":
    """The target of servers that start in the background, so that engines can start at the same time.

    wrapper: prefix of commands that run what the servers run.
    """
    port = _free_ports(len(devices))
    targets = [f"127.0.0.1:{port + index}" for index in range(len(devices))]

    def start() -> Encoders:
        servers = []
        for index, device in enumerate(devices):
            words = ["--device", device, "--port", str(port + index), *flags]
            servers.append(stack.enter_context(serving(model, *words, wait=False, wrapper=wrapper)))
        return Encoders(servers)

    with ExitStack() as stack, ThreadPoolExecutor(1) as starter:
        yield targets[0] if len(targets) == 1 else f"ipv4:{','.join(targets)}", starter.submit(start)


def environment(options: argparse.Namespace) -> list[str]:
    """Prefix of commands that run what the server runs."""
    path = options.server_pythonpath or f"client:gateway:server:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    return ["env", f"PYTHONPATH={path}"]


def written(options: argparse.Namespace, language: str) -> Path:
    """The checkpoint with a language model of this size; written if it is not there."""
    model: Path = options.model
    if language != "2b":
        model = model.with_name(f"{model.name}-{language}")
    if not model.exists():
        words = [PYTHON, "-m", checkpoint.__name__, str(model), "--language", language]
        words += ["--tiny"] if options.tiny else ["--device", "cuda"]
        subprocess.run([*environment(options), *words], check=True, stdout=2)  # stdout is the benchmark's
    return model


def _free_ports(count: int) -> int:
    """The first of consecutive ports. Raises RuntimeError if there are none."""
    for first in range(_FIRST_PORT + os.getpid() % 1000 * 8, _LAST_PORT):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        return first
    raise RuntimeError(f"no {count} consecutive ports are free")
