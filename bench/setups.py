"""What service-bench measures: setups of servers, and loads on them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from servers import ServerProcess, serving, supervising

READY_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Load:
    """Side of the images, one per request, and the number of requests in flight."""

    side: int
    in_flight: int

    @classmethod
    def of(cls, text: str) -> "Load":
        """SIDE:IN_FLIGHT."""
        side, _, in_flight = text.partition(":")
        return cls(int(side), int(in_flight))


@dataclass(frozen=True, slots=True)
class Setup:
    """What is served, where and how."""

    model: str
    devices: str
    rpc_processes: int

    def row(self) -> dict[str, Any]:
        """As columns of a row."""
        return asdict(self)


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
