"""The Vitwire server of the benchmark: one process on each of its devices."""

import argparse
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.engine import checkpoint

from servers import PYTHON, ServerProcess, serving, supervising

_FIRST_PORT, _LAST_PORT = 20000, 32000
"""Below those that Linux gives to outgoing connections."""


@dataclass(frozen=True, slots=True)
class Encoders:
    """Processes by label; `root` supervises them, or is the only one."""

    root: ServerProcess
    processes: dict[str, ServerProcess]

    def wait(self, seconds: float) -> None:
        """Until all are ready. Raises RuntimeError if one takes longer, or the server ends."""
        for label in self.processes:
            self.root.wait_for(rf"\[{label}\] ready: " if len(self.processes) > 1 else "ready: ", seconds)

    def busy_seconds(self) -> float:
        """Seconds of computation on all devices so far."""
        return sum(each.metric("vitwire_stage_seconds_sum", stage="execute") for each in self.processes.values())


@contextmanager
def starting(
    model: Path, devices: Sequence[str], flags: Sequence[str], wrapper: Sequence[str]
) -> "Iterator[tuple[str, Future[Encoders]]]":
    """The target of a server that starts in the background, so that engines can start at the same time.

    wrapper: prefix of commands that run what the server runs.
    """
    port = _free_ports(len(devices))
    words = ["--port", str(port), *flags]

    def start() -> Encoders:
        if len(devices) > 1:
            supervised = supervising(model, ",".join(devices), *words, ready=False, wrapper=wrapper)
            return Encoders(*stack.enter_context(supervised))
        alone = serving(model, "--device", devices[0], *words, wait=False, wrapper=wrapper)
        return Encoders(server := stack.enter_context(alone), {devices[0]: server})

    with ExitStack() as stack, ThreadPoolExecutor(1) as starter:
        targets = [f"127.0.0.1:{port + index}" for index in range(len(devices))]
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
