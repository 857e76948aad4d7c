"""The command line of `make service-bench`."""

import argparse
from os import cpu_count
from pathlib import Path

from bench.images import PIXELS
from bench.models import PUBLISHED
from bench.setups import Load


def parser(description: str | None) -> argparse.ArgumentParser:
    """Of the process's arguments."""
    parser = argparse.ArgumentParser("service-bench", description=description)
    names = list(PUBLISHED)
    add = parser.add_argument
    add("--models", nargs="+", choices=names, default=names[:1], metavar="MODEL", help=", ".join(names))
    add("--devices", nargs="+", default=["cuda:0"], help="setups: cuda:0 is one process, cuda:0,cuda:1 are two")
    add("--rpc-processes", nargs="+", type=_count, default=[1], help="RPC processes of each device")
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
        help=f"[PIXELS:]SIZE:REQUESTS in flight, such as 224:64 or jpeg:1080p:64; pixels: {', '.join(PIXELS)}",
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
