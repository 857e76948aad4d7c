"""Experiments with a simulated fleet: routing, crashes, and how late an autoscaler is. See docs/scale.md.

`python -m bench.simulation.study` prints a row per experiment and ends in one JSON line. All random numbers follow from
the seeds, so a run is reproducible. A figure is the median over the seeds; `spread` has the lowest and the highest.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench import sizes
from bench.simulation.fleet import Costs, Fleet
from bench.simulation.load import Images
from bench.simulation.routing import POLICIES
from bench.simulation.scaling import SCENARIOS, doubled

from vitwire_server.fitting.traces import read_trace

Row = dict[str, Any]
Experiment = Callable[[int], Row]
PARTS = ("calibration", "routing", "routers", "failures", "scaling")
MEASURED = ((49, 64, 1664.0), (49, 128, 2195.0), (196, 64, 539.0), (1024, 32, 67.7))
"""Tokens of an image, requests in flight, images per second that docs/performance/service.md has for 6 edges."""
CRASH_AFTER, CRASH_SECONDS = 2.0, 30.0
"""When the replicas crash, and how long is measured: until some time after they are back."""


class Study:
    """The experiments, for the options of the command line."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.recorded = [each.tokens for each in read_trace(options.trace, merge=2)] if options.trace else None

    def tokens(self, seed: int) -> list[int]:
        """Sizes of images."""
        return self.recorded or [each.tokens for each in sizes.footprints(20_000, seed=seed)]

    def fleet(self, policy: str, load: float, seed: int, *, cache: bool, routers: int, seconds: float) -> Fleet:
        """A fleet under load, at the end of its warm-up; load is a share of its capacity without hits."""
        options, tokens = self.options, self.tokens(seed)
        images = Images(tokens, options.repeats, seed)
        cache_bytes = options.cache_gib * 2**30 * cache
        fleet = Fleet(options.replicas, policy, cache_bytes=cache_bytes, routers=routers, seed=seed)
        images.fill(fleet)
        rate = load * fleet.costs.capacity(tokens) * options.replicas
        fleet.env.process(images.arrive(fleet, lambda _: rate, options.warm_up + seconds))
        fleet.tally.start = options.warm_up
        fleet.env.run(until=options.warm_up)
        return fleet

    def routing(self, policy: str, load: float, seed: int, *, cache: bool, routers: int | None = None) -> Row:
        """One policy at one load."""
        routers, seconds = routers or self.options.routers, self.options.seconds
        fleet = self.fleet(policy, load, seed, cache=cache, routers=routers, seconds=seconds)
        before = np.array(fleet.busy_seconds)
        fleet.env.run(until=self.options.warm_up + seconds)
        busy = (np.array(fleet.busy_seconds) - before) / seconds
        fleet.drain()
        row = {"policy": policy, "cache": cache, "load": load, "routers": routers}
        shares = {"busy": round(float(busy.mean()), 3), "busiest": round(float(busy.max()), 3)}
        return row | fleet.tally.row(seconds) | shares

    def failures(self, policy: str, share: float, seed: int) -> Row:
        """A share of the replicas crashes at once; each is back, with an empty cache, when a server would be ready."""
        load = 0.7
        fleet = self.fleet(policy, load, seed, cache=True, routers=self.options.routers, seconds=CRASH_SECONDS)
        crash = self.options.warm_up + CRASH_AFTER
        fleet.env.run(until=crash)
        for replica in fleet.replicas[: round(share * len(fleet.replicas))]:
            replica.crash(fleet.costs.ready_seconds)
        fleet.env.run(until=self.options.warm_up + CRASH_SECONDS)
        fleet.drain()
        late = fleet.tally.late_windows(crash, self.options.aim_ms / 1e3)
        row = {"policy": policy, "load": load, "crashed": share, "seconds_over_aim": len(late)}
        return row | fleet.tally.row(CRASH_SECONDS)

    def scaling(self, number: int, seed: int) -> Row:
        """Load that doubles at once."""
        options = self.options
        cache_bytes = options.cache_gib * 2**30
        tokens = self.tokens(seed)
        return doubled(tokens, SCENARIOS[number], options.scaling_replicas, cache_bytes, options.aim_ms / 1e3, seed)[0]

    def experiments(self, part: str) -> Iterator[Experiment]:
        """The experiments of a part, each of which takes a seed."""
        loads = self.options.loads
        if part == "calibration":
            yield from (partial(calibration, *row) for row in MEASURED)
        elif part == "routing":
            chosen = self.options.policies
            cases = [(p, False) for p in chosen if not p.endswith("hash")] + [(p, True) for p in chosen]
            yield from (partial(self.routing, p, load, cache=cache) for p, cache in cases for load in loads)
        elif part == "routers":
            yield from (partial(self.routing, "least_request", 0.85, cache=False, routers=n) for n in (1, 5, 50))
        elif part == "failures":
            yield from (
                partial(self.failures, policy, share)
                for policy in ("least_request", "bounded_hash")
                for share in (0.0, 0.1, 0.25)
            )
        else:
            yield from (partial(self.scaling, number) for number in range(len(SCENARIOS)))


def calibration(tokens: int, in_flight: int, measured: float, seed: int, seconds: float = 10.0) -> Row:
    """One replica with requests back to back, as in the measurement that the costs were taken from."""
    warm_up = 2.0
    fleet = Fleet(1, "round_robin", seed=seed)
    fleet.tally.start = warm_up
    fleet.on_answer = lambda _: fleet.arrive(tokens, 0) if fleet.env.now < warm_up + seconds else None
    for _ in range(in_flight):
        fleet.arrive(tokens, 0)
    fleet.env.run(until=warm_up + seconds)
    fleet.drain()
    return {"tokens": tokens, "in_flight": in_flight, "measured": measured} | fleet.tally.row(seconds)


def over_seeds(experiment: Experiment, seeds: int) -> Row:
    """The median of each figure, and the spread of those that differ."""
    rows = [experiment(seed) for seed in range(seeds)]
    merged, spread = dict(rows[0]), {}
    for name, value in rows[0].items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            values = [row[name] for row in rows]
            merged[name] = round(float(np.median(values)), 5)
            if min(values) != max(values):
                spread[name] = [min(values), max(values)]
    return merged | {"spread": spread}


def run(options: argparse.Namespace) -> Row:
    """All parts; prints rows as they are done."""
    study = Study(options)
    tokens = study.tokens(0)
    document: Row = {name: getattr(options, name) for name in ("replicas", "seconds", "seeds", "repeats", "routers")}
    document |= {"capacity": round(Costs().capacity(tokens), 1), "mean_tokens": round(float(np.mean(tokens)), 1)}
    for part in options.parts:
        document[part] = []
        for experiment in study.experiments(part):
            document[part].append(over_seeds(experiment, options.seeds))
            print(part, json.dumps(document[part][-1]), file=sys.stderr, flush=True)
    return document


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10.0, help="simulated seconds that are measured")
    parser.add_argument("--warm-up", type=float, default=5.0, help="simulated seconds before them")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each experiment")
    parser.add_argument("--loads", nargs="+", type=float, default=[0.5, 0.7, 0.85, 0.95])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--routers", type=int, default=50, help="clients or proxies that each balance by themselves")
    parser.add_argument("--trace", type=Path, help="sizes, as vitwire-server serve --record-trace writes them")
    parser.add_argument("--repeats", type=float, default=0.5, help="share of images from the catalogue (an assumption)")
    parser.add_argument("--cache-gib", type=float, default=16.0, help="cache of each replica")
    parser.add_argument("--aim-ms", type=float, default=500.0, help="latency that 99 %% of the requests should keep")
    parser.add_argument("--scaling-replicas", type=int, default=4, help="replicas before the load doubles")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--plot", type=Path, help="folder for fleet-routing.svg and fleet-scaling.svg")
    return parser.parse_args(words)


def main() -> None:
    """Entry point."""
    options = parsed()
    document = run(options)
    if options.plot:
        from bench.simulation.plots import plot_routing, plot_scaling  # noqa: PLC0415  # matplotlib, for --plot only

        if "routing" in document:
            plot_routing(document["routing"], options.plot / "fleet-routing.svg")
        if "scaling" in document:
            plot_scaling(Study(options).tokens(0), options, options.plot / "fleet-scaling.svg")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
