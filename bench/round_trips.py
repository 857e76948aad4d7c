"""Round trips, alternately by bare gRPC and by the service: the part `trips` of `make wire-bench`."""

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from bench.client_processes import ClientProcess, Measured, bare_servers, loaded, prepared
from bench.commands import Row

from servers import ServerProcess


class RoundTrip(NamedTuple):
    """One round trip: the server that answers it, its image, and how many are in flight."""

    server: str
    side: int
    pixels: str
    in_flight: int = 1


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
                work = {"size": str(trip.side), "pixels": trip.pixels}
                size = prepared([raw, library], work)
                prepared([bare], {**work, "answer": size["answer"]})
                yield from _rows(trip, size, _alternated(paths, servers, trip.in_flight, options))


def _alternated(
    clients: Mapping[str, ClientProcess], servers: Mapping[str, Sequence[int]], in_flight: int, options: Namespace
) -> dict[str, Measured]:
    """Run the clients one after the other, again and again, so that a slow phase of the machine slows all of them."""
    seconds = options.seconds / options.turns
    turns: dict[str, list[Measured]] = {name: [] for name in clients}
    for _ in range(options.turns):
        for name, client in clients.items():
            turns[name].append(loaded([client], in_flight, seconds, servers[name], ramp=0.2))
    return {name: _together(each) for name, each in turns.items()}


def _together(turns: Sequence[Measured]) -> Measured:
    return Measured(
        sum(each.seconds for each in turns),
        sorted(latency for each in turns for latency in each.latencies),
        dict(sum((Counter(each.errors) for each in turns), Counter())),
        sum(each.server_cpu for each in turns),
        sum(each.client_cpu for each in turns),
    )


def _rows(trip: RoundTrip, size: Row, times: Mapping[str, Measured]) -> Iterator[tuple[str, Row]]:
    """Milliseconds are the median of calls that are alone, else those of a call's share of the time."""
    nbytes = size["up"] + size["down"]
    own: Row = {"in_flight": trip.in_flight, **{f"{way}_mb": round(size[way] / 1e6, 2) for way in ("up", "down")}}
    taken = {name: each.milliseconds(0.5) if trip.in_flight == 1 else 1e3 / each.rate for name, each in times.items()}
    yield (
        "trips",
        {
            **own,
            **{f"{name}_ms": round(each, 2) for name, each in taken.items()},
            "service_over_bare": round(taken["service"] / taken["bare"], 2),
            "client_over_bare": round(taken["client"] / taken["bare"], 2),
            "client_gb_per_s": round(nbytes / taken["client"] / 1e6, 2),
            "errors": sum(sum(each.errors.values()) for each in times.values()),
        },
    )
    for name, each in times.items():
        yield "cpu", {**own, "path": name, **each.cpu_per_gigabyte(nbytes)}
