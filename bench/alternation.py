"""Measurements of several paths in alternation, so that a slow phase of the machine slows all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from bench.client_processes import ClientProcess, cpu_seconds

Row = dict[str, Any]


class Options(Protocol):
    """How long to measure each path, and in how many turns."""

    seconds: float
    turns: int


@dataclass(frozen=True, slots=True)
class PathTimes:
    """What one path took over all its turns."""

    seconds: float
    """A call: the median of calls that are alone, else the median turn's time over its calls."""
    calls: int
    server_cpu: float
    client_cpu: float
    errors: int

    def per_gigabyte(self, nbytes: int) -> Row:
        """Seconds of processors on both sides for each GB, where a call moves so many bytes."""
        gigabytes = self.calls * nbytes / 1e9
        both = {"server_cpu_s_per_gb": self.server_cpu, "client_cpu_s_per_gb": self.client_cpu}
        return {name: round(seconds / gigabytes, 3) for name, seconds in both.items()}


def alternated(
    clients: Mapping[str, ClientProcess], servers: Mapping[str, Sequence[int]], in_flight: int, options: Options
) -> dict[str, PathTimes]:
    """Run the clients one after the other, again and again, so that a slow phase of the machine slows all of them."""
    count = {name: max(in_flight, _calls_within(client, in_flight, options)) for name, client in clients.items()}
    samples: dict[str, list[float]] = {name: [] for name in clients}
    server_cpu, client_cpu = dict.fromkeys(clients, 0.0), dict.fromkeys(clients, 0.0)
    errors = dict.fromkeys(clients, 0)
    for _ in range(options.turns):
        for name, client in clients.items():
            before = cpu_seconds(servers[name]), cpu_seconds([client.pid])
            answer = client.ask(run={"in_flight": in_flight, "calls": count[name]})
            server_cpu[name] += cpu_seconds(servers[name]) - before[0]
            client_cpu[name] += cpu_seconds([client.pid]) - before[1]
            errors[name] += sum(map(bool, answer["error"]))
            samples[name] += answer["seconds"] if in_flight == 1 else [_span(answer) / count[name]]
    return {
        name: PathTimes(median(taken), options.turns * count[name], server_cpu[name], client_cpu[name], errors[name])
        for name, taken in samples.items()
    }


def _calls_within(client: ClientProcess, in_flight: int, options: Options) -> int:
    """Calls that take about a turn's time; those that count it also warm up."""
    client.ask(run={"in_flight": in_flight, "calls": 2 * in_flight})
    took = _span(client.ask(run={"in_flight": in_flight, "calls": 2 * in_flight}))
    return min(500, int(options.seconds / options.turns * 2 * in_flight / took))


def _span(answer: Row) -> float:
    """Seconds from the start of the first call to the end of the last."""
    starts = (at - took for at, took in zip(answer["at"], answer["seconds"], strict=True))
    return float(max(answer["at"]) - min(starts))
