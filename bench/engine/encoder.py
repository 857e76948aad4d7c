"""The Vitwire server of the benchmark."""

import argparse
import os
import socket
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.engine import checkpoint

from servers import PYTHON, ServerProcess, serving

_FIRST_PORT, _LAST_PORT = 20000, 32000
"""Below those that Linux gives to outgoing connections."""


@contextmanager
def starting(
    model: Path, device: str, flags: Sequence[str], wrapper: Sequence[str]
) -> "Iterator[tuple[str, Future[ServerProcess]]]":
    """The target of a server that starts in the background, so that an engine can start at the same time.

    wrapper: prefix of commands that run what the server runs.
    """
    port = _free_port()

    def start() -> ServerProcess:
        words = ["--device", device, "--port", str(port), *flags]
        return stack.enter_context(serving(model, *words, wait=False, wrapper=wrapper))

    with ExitStack() as stack, ThreadPoolExecutor(1) as starter:
        yield f"127.0.0.1:{port}", starter.submit(start)


def environment(options: argparse.Namespace) -> list[str]:
    """Prefix of commands that run what the server runs."""
    path = options.server_pythonpath or f"client:gateway:server:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    return ["env", f"PYTHONPATH={path}"]


def written(options: argparse.Namespace) -> Path:
    """The checkpoint with the language model that is asked for; written if it is not there."""
    model: Path = options.model
    if options.language != "2b":
        model = model.with_name(f"{model.name}-{options.language}")
    if not model.exists():
        words = [PYTHON, "-m", checkpoint.__name__, str(model), "--language", options.language]
        words += ["--tiny"] if options.tiny else ["--device", "cuda"]
        subprocess.run([*environment(options), *words], check=True, stdout=2)  # stdout is the benchmark's
    return model


def _free_port() -> int:
    """Raises RuntimeError if there is none."""
    for port in range(_FIRST_PORT + os.getpid() % 1000 * 8, _LAST_PORT):
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise RuntimeError("no port is free")
