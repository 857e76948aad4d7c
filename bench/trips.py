"""Round trips, in turns by bare gRPC and by the service: the part `trips` of `make wire-bench`."""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from bench.fleet import Client, bare_servers, prepared
from bench.turns import Turns, in_turns

from servers import ServerProcess

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Trip:
    """One round trip: the server that answers it, its image, and how many are in flight."""

    server: str
    side: int
    pixels: str
    in_flight: int = 1

    @property
    def work(self) -> Row:
        return {"side": self.side, "pixels": self.pixels}


TRIPS = (
    # 0.6, 3.1, 12.6 and 25 MB up and next to nothing down, then 1.6 and 34 MB down
    *(Trip("narrow", *image) for image in ((224, "float16"), (1024, "uint8"), (1024, "float16"), (1024, "float32"))),
    *(Trip("wide", side, "uint8") for side in (224, 1024)),
    Trip("wide", 224, "uint8", in_flight=16),
    Trip("wide", 1024, "float16", in_flight=4),
)
QUICK = (Trip("wide", 224, "uint8"), Trip("wide", 224, "uint8", in_flight=4))


def measured(server: ServerProcess, name: str, options: Namespace) -> Iterator[tuple[str, Row]]:
    """Rows of the tables `trips` and `cpu`: a bare server, the service, and the service through the client library.

    name: of the server, by which its trips are chosen.
    """
    with ExitStack() as stack:
        target, pids = stack.enter_context(bare_servers(1))
        bare = stack.enter_context(Client("raw", target=target, model=server.target))
        raw = stack.enter_context(Client("raw", target=server.target))
        library = stack.enter_context(Client("client", target=server.target))
        servers = {"bare": pids, "service": [server.process.pid], "client": [server.process.pid]}
        paths = {"bare": bare, "service": raw, "client": library}
        for trip in QUICK if options.quick else TRIPS:
            if trip.server == name:
                size = prepared([raw, library], trip.work)
                prepared([bare], {**trip.work, "answer": size["answer"]})
                yield from _rows(trip, size, in_turns(paths, servers, trip.in_flight, options))


def _rows(trip: Trip, size: Row, turns: Mapping[str, Turns]) -> Iterator[tuple[str, Row]]:
    nbytes = size["up"] + size["down"]
    own: Row = {"in_flight": trip.in_flight, **{f"{way}_mb": round(size[way] / 1e6, 2) for way in ("up", "down")}}
    yield (
        "trips",
        {
            **own,
            **{f"{name}_ms": round(1e3 * each.seconds, 2) for name, each in turns.items()},
            "service_over_bare": round(turns["service"].seconds / turns["bare"].seconds, 2),
            "client_over_bare": round(turns["client"].seconds / turns["bare"].seconds, 2),
            "client_gb_per_s": round(nbytes / turns["client"].seconds / 1e9, 2),
            "errors": sum(each.errors for each in turns.values()),
        },
    )
    for name, each in turns.items():
        yield "cpu", {**own, "path": name, **each.per_gigabyte(nbytes)}
