"""Round trips, alternately by bare gRPC and by the service: the part `trips` of `make wire-bench`."""

from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from bench.alternation import PathTimes, alternated
from bench.client_processes import ClientProcess, bare_servers, prepared

from servers import ServerProcess

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RoundTrip:
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
    *(
        RoundTrip("narrow", *image)
        for image in ((224, "float16"), (1024, "uint8"), (1024, "float16"), (1024, "float32"))
    ),
    *(RoundTrip("wide", side, "uint8") for side in (224, 1024)),
    RoundTrip("wide", 224, "uint8", in_flight=16),
    RoundTrip("wide", 1024, "float16", in_flight=4),
)
QUICK = (RoundTrip("wide", 224, "uint8"), RoundTrip("wide", 224, "uint8", in_flight=4))


def measured(server: ServerProcess, name: str, options: Namespace) -> Iterator[tuple[str, Row]]:
    """Rows of the tables `trips` and `cpu`: a bare server, the service, and the service through the client library.

    name: of the server, by which its trips are chosen.
    """
    with ExitStack() as stack:
        target, pids = stack.enter_context(bare_servers(1))
        bare = stack.enter_context(ClientProcess("raw", target=target, model=server.target))
        raw = stack.enter_context(ClientProcess("raw", target=server.target))
        library = stack.enter_context(ClientProcess("client", target=server.target))
        servers = {"bare": pids, "service": [server.process.pid], "client": [server.process.pid]}
        paths = {"bare": bare, "service": raw, "client": library}
        for trip in QUICK if options.quick else TRIPS:
            if trip.server == name:
                size = prepared([raw, library], trip.work)
                prepared([bare], {**trip.work, "answer": size["answer"]})
                yield from _rows(trip, size, alternated(paths, servers, trip.in_flight, options))


def _rows(trip: RoundTrip, size: Row, times: Mapping[str, PathTimes]) -> Iterator[tuple[str, Row]]:
    nbytes = size["up"] + size["down"]
    own: Row = {"in_flight": trip.in_flight, **{f"{way}_mb": round(size[way] / 1e6, 2) for way in ("up", "down")}}
    yield (
        "trips",
        {
            **own,
            **{f"{name}_ms": round(1e3 * each.seconds, 2) for name, each in times.items()},
            "service_over_bare": round(times["service"].seconds / times["bare"].seconds, 2),
            "client_over_bare": round(times["client"].seconds / times["bare"].seconds, 2),
            "client_gb_per_s": round(nbytes / times["client"].seconds / 1e9, 2),
            "errors": sum(each.errors for each in times.values()),
        },
    )
    for name, each in times.items():
        yield "cpu", {**own, "path": name, **each.per_gigabyte(nbytes)}
