"""What service-bench measures: setups of servers, and loads on them; and its command line."""

import argparse
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import cpu_count
from pathlib import Path

from bench.images import PIXELS, SIZES
from bench.models import PUBLISHED

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
    decode: str = "auto"
    """Where files are decoded: the server's `--decode`."""

    def __str__(self) -> str:
        return f"{self.model} on {self.devices}, RPC processes: {self.rpc_processes}, --decode {self.decode}"


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

    def counted(self) -> tuple[float, float]:
        """Seconds of computation on all devices, and files that GPUs have decoded, so far."""
        seconds = sum(each.metric("vitwire_stage_seconds_sum", stage="execute") for each in self.processes)
        named = {"where": "device", "stage": "decode"}
        return seconds, sum(each.metric("vitwire_prepare_seconds_count", **named) for each in self.processes)


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


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags of the benchmark."""
    parser = argparse.ArgumentParser("service-bench", description=description)
    names = list(PUBLISHED)
    add = parser.add_argument
    add("--models", nargs="+", choices=names, default=names[:1], metavar="MODEL", help=", ".join(names))
    add("--devices", nargs="+", default=["cuda:0"], help="setups: cuda:0 is one process, cuda:0,cuda:1 are two")
    add("--rpc-processes", nargs="+", type=_count, default=[1], help="RPC processes of each device")
    places = ["auto", "cpu", "device"]
    add("--decode", nargs="+", choices=places, default=places[:1], help="where the server decodes files")
    add(
        "--delivery",
        nargs="+",
        default=["stream"],
        help="stream, nixl (to the host), nixl:cuda:0, nixl:cuda (the devices in turn)",
    )
    kinds = ["client", "raw"]
    add("--drivers", nargs="+", choices=kinds, default=["client"], help="clients of streams; raw is grpc.aio alone")
    loads = [Load("224", 1), Load("224", 64), Load("448", 64), Load("1024", 32)]
    add(
        "--loads",
        nargs="+",
        type=_load,
        default=loads,
        help=f"[PIXELS:]SIZE:REQUESTS in flight, as 224:64, jpeg:1080p:64, clip:448p:8; pixels: {', '.join(PIXELS)}",
    )
    add("--bare", nargs="*", type=_count, default=[1, 2, 4, 6], help="processes of the bare gRPC servers")
    add("--clients", type=_count, default=max(1, min(8, (cpu_count() or 2) // 2)), help="client processes, at most")
    add("--connections", type=_count, default=4, help="connections of each client of the kind raw, and to bare servers")
    add("--seconds", type=float, default=4.0, help="how long each load is measured")
    add("--minutes", type=float, default=9.0, help="start no measurement later than this; what is left out is listed")
    add("--image-tokens", type=int, default=1024, help="tokens that the server shrinks pictures and files to, at most")
    add("--tiny", action="store_true", help="towers of the same shape, but small")
    add("--checkpoints", type=Path, help="write towers here and keep them, or use those that are there")
    add("--flags", default="", help="more flags of vitwire-server serve, in one argument")
    add("--out", type=Path, help="write the JSON document here too, after each row")
    return parser


def _load(text: str) -> Load:
    """Type of an option with a load."""
    try:
        return Load.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    """Type of an option that counts."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError("must be a whole number, at least 1")
    return int(text)
