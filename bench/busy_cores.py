"""A server on a CPU beside busy cores: the part `waiting` of `make wire-bench`."""

import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from bench.alternation import alternated
from bench.client_processes import ClientProcess, prepared

from servers import ServerProcess, serving
from vitwire_server.config.host import cores

Row = dict[str, Any]
WORK = {"side": 224}
SPINNING = {"GOMP_SPINCOUNT": "300000"}
"""What libgomp does by default: its threads spin for milliseconds at each barrier."""
FLAGS = ("--canary-seconds", "0")
_FOREVER = "while True: pass"


@contextmanager
def busy_cores() -> Iterator[None]:
    """A program on each core that never waits."""
    programs = [subprocess.Popen([sys.executable, "-c", _FOREVER]) for _ in range(cores())]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


CORES: Mapping[str, Callable[[], AbstractContextManager[None]]] = {"idle": nullcontext, "busy": busy_cores}


def waiting(model: Path, options: Namespace) -> Iterator[Row]:
    """Milliseconds a call of a server as it is, whose threads sleep at barriers, and of one whose threads spin."""
    with ExitStack() as stack:
        policies: Mapping[str, Mapping[str, str]] = {"sleeping": {}, "spinning": SPINNING}
        servers = {name: stack.enter_context(_server(model, environment)) for name, environment in policies.items()}
        clients = {
            name: stack.enter_context(ClientProcess("client", target=each.target)) for name, each in servers.items()
        }
        prepared(list(clients.values()), WORK)
        pids = {name: [server.process.pid] for name, server in servers.items()}
        for state, neighbours in CORES.items():
            with neighbours():
                times = alternated(clients, pids, 1, options)
            sleeping, spinning = (1e3 * times[name].seconds for name in policies)
            yield {
                "cores": state,
                "sleeping_ms": round(sleeping, 2),
                "spinning_ms": round(spinning, 2),
                "spinning_over_sleeping": round(spinning / sleeping, 2),
                "errors": sum(each.errors for each in times.values()),
            }


@contextmanager
def _server(model: Path, environment: Mapping[str, str]) -> Iterator[ServerProcess]:
    """A server with the threads that it chooses by itself."""
    unset = ("-u", "OMP_NUM_THREADS", "-u", "OMP_WAIT_POLICY")
    wrapper = ("env", *unset, *(f"{key}={value}" for key, value in environment.items()))
    with serving(model, *FLAGS, wrapper=wrapper) as server:
        yield server
