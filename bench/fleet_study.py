"""Experiments with a simulated fleet: routing by load, crashes, and how late an autoscaler may be. See docs/scale.md.

`python -m bench.fleet_study --replicas 1000` prints tables and ends in one JSON line. A run is reproducible: all
random numbers follow from `--seed`.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import simpy
from bench import sizes
from bench.fleet_simulation import BATCH_TOKENS, POLICIES, READY_SECONDS, ROUTERS, Fleet, Replica, Request, Tally
from bench.fleet_simulation import device_seconds as batch_seconds

from vitwire_server.fitting.traces import read_trace

Row = dict[str, Any]
LOADS = (0.5, 0.7, 0.85, 0.95)
WARM_SECONDS = 1.0
_CATALOGUE = 200_000
"""Contents that are sent again and again."""
_ZIPF = 0.8
_PERIOD = 15.0
"""Seconds between decisions of the autoscaler, as of a HorizontalPodAutoscaler."""
_TARGET = 0.7
"""Busy share of a device that the autoscaler aims at."""


class Images:
    """What arrives: sizes from a trace, and contents of which a share repeats."""

    def __init__(self, tokens: Sequence[int], repeats: float, seed: int) -> None:
        self.tokens, self.repeats = tokens, repeats
        self.rng = np.random.default_rng(seed)
        weights = 1 / np.arange(1, _CATALOGUE + 1) ** _ZIPF
        self.cumulative = np.cumsum(weights / weights.sum())
        self.drawn: list[int] = []
        self.unique = _CATALOGUE

    @cached_property
    def capacity(self) -> float:
        """Images per second of one replica without hits, in full batches."""
        per_batch = BATCH_TOKENS / float(np.mean(self.tokens))
        each = float(np.mean([batch_seconds([tokens]) - batch_seconds([]) for tokens in self.tokens]))
        return 1 / (each + batch_seconds([]) / per_batch)

    def content(self) -> int:
        """The content of the next image: one of the catalogue, or a new one."""
        if not self.drawn:
            repeated = np.searchsorted(self.cumulative, self.rng.random(10_000))
            self.drawn = np.where(self.rng.random(10_000) < self.repeats, repeated, -1).tolist()
        found = self.drawn.pop()
        if found >= 0:
            return found
        self.unique += 1
        return self.unique

    def size(self, content: int) -> int:
        """Equal contents have equal sizes."""
        return self.tokens[content * 7919 % len(self.tokens)]

    def arrive(self, fleet: Fleet, rate: Callable[[float], float]) -> Generator[simpy.Event, None, None]:
        """A Poisson process at a rate that may change with time."""
        while True:
            yield fleet.env.timeout(float(self.rng.exponential(1 / rate(fleet.env.now))))
            content = self.content()
            router = int(self.rng.random() * ROUTERS)
            fleet.submit(Request(fleet.env.now, self.size(content), content, router))

    def fill(self, fleet: Fleet) -> None:
        """Caches as they are after a long time: each replica has seen what its policy sends it."""
        if not fleet.cache_tokens:
            return
        if fleet.policy.endswith("hash"):
            for content in range(_CATALOGUE - 1, -1, -1):
                request = Request(0.0, self.size(content), content, 0)
                fleet.on_ring(request).remember(content, request.tokens)
            return
        draws = 2 * fleet.cache_tokens // int(np.mean(self.tokens))
        for replica in fleet.replicas:
            for _ in range(draws):
                content = self.content()
                replica.remember(content, self.size(content))


def routing(tokens: Sequence[int], options: argparse.Namespace, policy: str, load: float, *, cache: bool) -> Row:
    """One policy at one load, in shares of the capacity without cache."""
    images = Images(tokens, options.repeats, options.seed)
    tally = Tally(WARM_SECONDS)
    fleet = Fleet(options.replicas, policy, options.cache_gib * 2**30 * cache, tally, options.seed)
    images.fill(fleet)
    fleet.env.process(images.arrive(fleet, lambda _: load * images.capacity * options.replicas))
    fleet.env.run(until=WARM_SECONDS + options.seconds)
    return {"policy": policy, "cache": cache, "load": load} | tally.row(options.seconds) | _spread(fleet, options)


def _spread(fleet: Fleet, options: argparse.Namespace) -> Row:
    busy = np.array([each.busy_seconds for each in fleet.replicas]) / (WARM_SECONDS + options.seconds)
    return {"busy": round(float(busy.mean()), 3), "busiest": round(float(busy.max()), 3)}


def failures(tokens: Sequence[int], options: argparse.Namespace, policy: str, share: float) -> Row:
    """A share of the replicas crashes at once and is back, with an empty cache, when a server would be ready."""
    load = 0.7
    images = Images(tokens, options.repeats, options.seed)
    tally = Tally(WARM_SECONDS)
    fleet = Fleet(options.replicas, policy, options.cache_gib * 2**30, tally, options.seed)
    images.fill(fleet)
    fleet.env.process(images.arrive(fleet, lambda _: load * images.capacity * options.replicas))
    fleet.env.run(until=WARM_SECONDS)
    for replica in fleet.replicas[: round(share * options.replicas)]:
        replica.crash(READY_SECONDS)
    fleet.env.run(until=WARM_SECONDS + options.seconds)
    return {"policy": policy, "load": load, "crashed": share} | tally.row(options.seconds)


def scaling(tokens: Sequence[int], options: argparse.Namespace, lag: float, growth: float) -> Row:
    """The load of a fleet at its target grows at once; replicas are added `lag` seconds after the decision."""
    count, minutes = options.scaling_replicas, 4
    images = Images(tokens, 0.0, options.seed)
    tally = Tally(0.0)
    fleet = Fleet(count, "least_request", 0, tally, options.seed)
    base = _TARGET * images.capacity * count
    fleet.env.process(images.arrive(fleet, lambda now: base * (growth if now > 30 else 1.0)))
    fleet.env.process(_autoscale(fleet, lag))
    fleet.env.run(until=60 * minutes)
    slow = sum(latency > 1 for latency in tally.latencies) / max(1, len(tally.latencies))
    row = {"growth": growth, "lag": lag, "replicas": f"{count} to {len(fleet.replicas)}", "over_1_s": round(slow, 4)}
    return row | tally.row(60 * minutes)


def _autoscale(fleet: Fleet, lag: float) -> Generator[simpy.Event, None, None]:
    """As a HorizontalPodAutoscaler: by the ratio of use to target, at most doubling at a time."""
    before = 0.0
    while True:
        yield fleet.env.timeout(_PERIOD)
        total = sum(each.busy_seconds for each in fleet.replicas)
        use = (total - before) / _PERIOD / len(fleet.live)
        queued = sum(len(each.queue) for each in fleet.live) / len(fleet.live)
        before = total
        ratio = max(use, min(2.0, queued / 64)) / _TARGET
        wanted = min(2 * len(fleet.live), math.ceil(len(fleet.live) * ratio)) if ratio > 1.1 else 0
        for name in range(len(fleet.replicas), wanted):
            fleet.replicas.append(Replica(fleet, name, ready=lag + READY_SECONDS))


def run(options: argparse.Namespace) -> Row:
    """All experiments; prints rows as they are done."""
    found = read_trace(options.trace, merge=2) if options.trace else sizes.footprints(20_000, seed=options.seed)
    tokens = [each.tokens for each in found]
    capacity = Images(tokens, 0.0, options.seed).capacity
    document: Row = {
        "replicas": options.replicas,
        "capacity": round(capacity, 1),
        "mean_tokens": float(np.mean(tokens)),
    }
    experiments: dict[str, list[Callable[[], Row]]] = {
        "routing": [
            *(
                lambda p=p, load=load: routing(tokens, options, p, load, cache=False)
                for p in POLICIES[:2]
                for load in LOADS
            ),
            *(lambda p=p, load=load: routing(tokens, options, p, load, cache=True) for p in POLICIES for load in LOADS),
        ],
        "failures": [
            lambda p=p, share=share: failures(tokens, options, p, share)
            for p in ("least_request", "bounded_hash")
            for share in (0.01, 0.1, 0.25)
        ],
        "scaling": [
            lambda lag=lag, growth=growth: scaling(tokens, options, lag, growth)
            for growth in (1.3, 2.0)
            for lag in (0, 30, 90)
        ],
    }
    for name in options.parts:
        document[name] = []
        for experiment in experiments[name]:
            document[name].append(experiment())
            print(name, json.dumps(document[name][-1]), file=sys.stderr, flush=True)
    return document


def plot(document: Row, path: Path) -> None:
    """Latency and hits by load, for each policy."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # for --plot only

    figure = Figure(figsize=(10, 4), layout="constrained")
    latency, hits = figure.subplots(1, 2)
    for cache in (False, True):
        for policy in POLICIES:
            rows = [row for row in document["routing"] if (row["policy"], row["cache"]) == (policy, cache)]
            if not rows:
                continue
            loads, style = [row["load"] for row in rows], "-" if cache else "--"
            label = policy.replace("_", " ") + ("" if cache else ", no cache")
            latency.plot(loads, [row["p99_ms"] for row in rows], style, marker="o", label=label)
            if cache:
                hits.plot(loads, [row["hits"] for row in rows], style, marker="o", label=label)
    latency.set(xlabel="load, share of the capacity without cache", ylabel="p99, ms", yscale="log")
    hits.set(xlabel="load, share of the capacity without cache", ylabel="share of images from the cache", ylim=(0, 1))
    latency.legend(fontsize=7)
    hits.legend(fontsize=7)
    figure.savefig(path, dpi=140)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=2.0, help="simulated seconds that are measured")
    parser.add_argument("--trace", type=Path, help="sizes, as vitwire-server serve --record-trace writes them")
    parser.add_argument("--repeats", type=float, default=0.5, help="share of images from the catalogue (an assumption)")
    parser.add_argument("--cache-gib", type=float, default=16.0, help="cache of each replica")
    parser.add_argument("--scaling-replicas", type=int, default=8)
    parser.add_argument(
        "--parts", nargs="+", choices=("routing", "failures", "scaling"), default=["routing", "failures", "scaling"]
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    document = run(options)
    if options.plot:
        plot(document, options.plot)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
