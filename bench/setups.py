"""What service-bench measures: setups of servers, and loads on them."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.images import PIXELS, SIZES

from servers import ServerProcess, serving, supervising

READY_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Load:
    """Images of one size, one per request, and the number of requests in flight."""

    size: str
    """A side, or a name of `SIZES`."""
    in_flight: int
    pixels: str = "uint8"
    """What is sent, of `PIXELS`."""

    @classmethod
    def of(cls, text: str) -> "Load":
        """[PIXELS:]SIZE:IN_FLIGHT. Raises ValueError."""
        found = re.fullmatch(r"(?:(\w+):)?(\w+):([1-9]\d*)", text)
        pixels, size, in_flight = found.groups("uint8") if found else ("", "", "")
        if pixels not in PIXELS or not (size in SIZES or size.isdecimal()):
            raise ValueError(f"{text!r} is not [PIXELS:]SIZE:IN_FLIGHT")
        return cls(size, int(in_flight), pixels)

    def __str__(self) -> str:
        return f"{self.pixels} {self.size}, {self.in_flight} in flight"


@dataclass(frozen=True, slots=True)
class Setup:
    """What is served, where and how."""

    model: str
    devices: str
    rpc_processes: int

    def __str__(self) -> str:
        return f"{self.model} on {self.devices}, RPC processes: {self.rpc_processes}"


@dataclass(frozen=True, slots=True)
class Server:
    """A running service: its processes by device, and the process that started them."""

    root: ServerProcess
    processes: Sequence[ServerProcess]

    @property
    def target(self) -> str:
        """One address, or all of them for the client to balance over."""
        targets = [each.target for each in self.processes]
        return targets[0] if len(targets) == 1 else "ipv4:" + ",".join(targets)

    def busy_seconds(self) -> float:
        """Seconds of computation on all devices so far."""
        return sum(each.metric("vitwire_stage_seconds_sum", stage="execute") for each in self.processes)


@contextmanager
def started(model: Path, devices: str, flags: Sequence[str]) -> Iterator[Server]:
    """A ready service on one device, or on several under a supervisor."""
    if "," not in devices:
        with serving(model, "--device", devices, *flags, wait=False) as server:
            server.wait_for("ready: ", READY_SECONDS)
            yield Server(server, [server])
    else:
        with supervising(model, devices, *flags) as (supervisor, children):
            yield Server(supervisor, list(children.values()))
