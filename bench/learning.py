"""`python bench/learning.py`: latency of requests while a server replaces its budgets, and what the steps take.

A published tower with random weights is served by engine, scheduler and learner in this process. Each client sends one
image after the other, in the sizes of `sizes.py`. All budgets but the largest are replaced by slightly smaller ones,
which is more than what a fit proposes: with captures in turns of a few milliseconds, as a server makes them, and with
captures as a whole, for comparison. The last line of stdout is one JSON document.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import product
from logging import getLogger
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
from bench import towers
from bench.report import Report
from bench.sizes import trace

from vitwire.shared.garbage import exempt_loaded
from vitwire_server.config.settings import ServeSettings
from vitwire_server.core.errors import EncoderError
from vitwire_server.core.grids import Footprint
from vitwire_server.core.items import Item
from vitwire_server.core.reports import Outcome
from vitwire_server.fitting.ladders import Proposal
from vitwire_server.observe.metrics import Metrics
from vitwire_server.process.loading import LoadedModel, load_model
from vitwire_server.runtime.ladders import learning, live_capture
from vitwire_server.runtime.ladders.calibration import sample_items
from vitwire_server.runtime.ladders.learning import LadderLearner
from vitwire_server.scheduling.planner import Planner
from vitwire_server.scheduling.scheduler import Scheduler
from vitwire_server.scheduling.tickets import Entry, Ticket

SHRUNK = 0.96
"""Of a budget's tokens, those of the one that replaces it."""
SWITCH_SECONDS = 0.0005
"""As the server sets it."""
TITLES = {
    "latency": "latency that clients see, ms",
    "steps": "steps of the changes, ms",
    "changes": "changes",
    "replays": "replays of full budgets, ms",
}
WAYS: Mapping[str, Mapping[str, float]] = {
    "in turns": {},
    "whole": {"TURN_SECONDS": 1e9, "LONGEST_REPLAY": 1e9},
}
"""Settings of captures."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request that was answered."""

    image: int
    began: float
    seconds: float
    failed: bool


@dataclass(slots=True)
class Watched:
    """A learner whose steps are timed, and which begins a change when asked."""

    learner: LadderLearner
    steps: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each step on the engine thread, by kind."""
    idle: Event = field(default_factory=Event)
    """No change is under way."""

    def planned(self, window: Sequence[Footprint], taken: int) -> None:
        self.learner.planned(window, taken)

    def seconds_until_due(self) -> float:
        return self.learner.seconds_until_due()

    def step(self) -> Planner | None:
        start = time.perf_counter()
        planner = self.learner.step()
        seconds = time.perf_counter() - start
        parts = self.learner._parts
        inner = getattr(parts, "gi_yieldfrom", None) or parts
        self.steps.setdefault(getattr(inner, "__name__", "end"), []).append(seconds)
        if planner is None and parts is None:
            self.idle.set()
        return planner

    def replaced(self) -> None:
        start = time.perf_counter()
        self.learner.replaced()
        self.steps.setdefault("replaced", []).append(time.perf_counter() - start)

    def stop(self) -> None:
        self.learner.stop()

    def begin(self, sizes: Sequence[int]) -> None:
        """Let the learner capture a ladder of these budgets as if a fit had proposed it."""
        self.idle.clear()
        fit: Future[tuple[Proposal | None, float]] = Future()
        fit.set_result((Proposal(tuple(sizes), is_default=False, gain=0.1, padding_before=0.0, padding=0.0), 0.0))
        self.learner._fit = fit


class Clients:
    """Threads that send one image after the other."""

    def __init__(self, scheduler: Scheduler, items: Sequence[Item], count: int) -> None:
        self.calls: list[Call] = []
        self._scheduler, self._items = scheduler, items
        self._stopping = Event()
        self._threads = [Thread(target=self._send, args=(seed,)) for seed in range(count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _send(self, seed: int) -> None:
        rng, answers, intake = np.random.default_rng(seed), SimpleQueue[Outcome](), self._scheduler.intake
        ticket = Ticket(lambda _, outcome: answers.put(outcome))
        while not self._stopping.is_set():
            image = int(rng.integers(len(self._items)))
            began = time.monotonic()
            intake.submit([Entry(ticket, 0, self._items[image], began)])
            outcome = answers.get()
            self.calls.append(Call(image, began, time.monotonic() - began, isinstance(outcome, EncoderError)))


class Bench:
    """A model that is served in this process."""

    def __init__(self, model: LoadedModel, metrics: Metrics, report: Report, options: argparse.Namespace) -> None:
        assert model.learner, "budgets learn"
        self.watched = Watched(model.learner)
        self.scheduler = Scheduler(model.engine, model.planner, metrics.engine, learner=self.watched)
        grids = [grid for request in trace(options.images, seed=1) for grid in request][: options.images]
        self.items = sample_items(model.tower, grids)
        self.model = model
        self._report, self._options = report, options
        self._engine = Thread(target=self.scheduler.run)
        self._engine.start()

    def stop(self) -> None:
        """End the engine; what was learned is kept afterwards."""
        self.scheduler.intake.close()
        self._engine.join()
        self.watched.learner._worker.shutdown()

    def run(self, count: int, way: str) -> None:
        """Clients before, during and after changes."""
        clients, watched, options = Clients(self.scheduler, self.items, count), self.watched, self._options
        settings = {name: getattr(live_capture, name) for name in WAYS["whole"]}
        vars(live_capture).update(WAYS[way])
        key = {"clients": count, "captures": way}
        time.sleep(1)  # caches of metadata, and of the allocator
        marks = [time.monotonic()]
        time.sleep(options.seconds)
        marks.append(time.monotonic())
        watched.steps.clear()
        finished = sum(self._change() for _ in range(options.changes))
        marks.append(time.monotonic())
        time.sleep(options.seconds)
        marks.append(time.monotonic())
        clients.stop()
        vars(live_capture).update(settings)
        self._latencies(key, clients.calls, marks)
        for kind, seconds in watched.steps.items():
            ordered = sorted(seconds)
            row = {"step": kind, "count": len(seconds), "total": round(1e3 * sum(seconds), 1)}
            self._report.add("steps", key | row | {"p50": _ms(ordered, 0.5), "longest": _ms(ordered, 1.0)})
        every = [each for seconds in watched.steps.values() for each in seconds]
        row = {"changes": options.changes, "finished": finished, "engine_s": round(sum(every), 2)}
        row |= {"over_s": round(marks[2] - marks[1], 1), "longest_step_ms": round(1e3 * max(every), 1)}
        self._report.add("changes", key | row)

    def replays(self, restarted: Planner) -> None:
        """Times of budgets captured at the start, which are tuned, and since, measured or assumed.

        `restarted` is the planner of a second start, which has tuned the learned budgets.
        """
        times = self.watched.learner._planner.costs.measured
        at_start, again = self.model.planner.costs.measured, restarted.costs.measured
        for tokens in sorted({*times, *again}):
            row: dict[str, Any] = {"budget": tokens, "captured": "at start" if tokens in at_start else "since"}
            row |= {"ms": _milliseconds(times.get(tokens)), "ms_after_restart": _milliseconds(again.get(tokens))}
            self._report.add("replays", row)

    def _change(self) -> bool:
        self.watched.begin(self._sizes())
        return self.watched.idle.wait(self._options.most)

    def _sizes(self) -> list[int]:
        """Of all budgets in use but the largest, slightly smaller ones."""
        demands = self.watched.learner._demands
        *smaller, largest = sorted({budget.tokens for budget in self.scheduler.intake.planner.ladder})
        return sorted({*(demands.budget(max(1, int(SHRUNK * size))).tokens for size in smaller), largest})

    def _latencies(self, key: dict[str, Any], calls: Sequence[Call], marks: Sequence[float]) -> None:
        names = ("before", "during", "after")
        steady: dict[int, list[float]] = {}
        for call in calls:
            if marks[0] <= call.began < marks[1] or marks[2] <= call.began < marks[3]:
                steady.setdefault(call.image, []).append(call.seconds)
        for name, since, until in zip(names, marks, marks[1:], strict=False):
            own = [call for call in calls if since <= call.began < until]
            taken = sorted(call.seconds for call in own)
            late = [call.seconds - median(steady[call.image]) for call in own if call.image in steady]
            later = [call.seconds - max(steady[call.image]) for call in own if call.image in steady]
            self._report.add(
                "latency",
                key
                | {
                    "when": name,
                    "calls": len(own),
                    "failed": sum(call.failed for call in own),
                    "p50": _ms(taken, 0.5),
                    "p99": _ms(taken, 0.99),
                    "longest": _ms(taken, 1.0),
                    "over_median_p90": _ms(sorted(late), 0.9),
                    "over_median_p99": _ms(sorted(late), 0.99),
                    "over_median_p999": _ms(sorted(late), 0.999),
                    "over_median_most": _ms(sorted(late), 1.0),
                    "over_slowest_most": _ms(sorted(later), 1.0),
                },
            )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)


def _ms(ordered: Sequence[float], share: float) -> float | None:
    return round(1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1) if ordered else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    add = parser.add_argument
    add("--model", default="Qwen3-VL-8B", help="a published tower")
    add("--tiny", action="store_true", help="a small tower of its shape")
    add("--device", default="cuda:0")
    add("--graphs", default="auto", help="as of vitwire-server serve")
    add("--max-budget-tokens", type=int, default=4096)
    add("--clients", type=int, nargs="+", default=[1, 8])
    add("--images", type=int, default=64, help="different images")
    add("--seconds", type=float, default=4, help="before and after a change")
    add("--changes", type=int, default=2)
    add("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    add("--most", type=float, default=40, help="most seconds of a change")
    add("--out", type=Path, help="write the document to this file as well")
    return parser


def loaded(model: Path, options: argparse.Namespace, metrics: Metrics) -> LoadedModel:
    """The tower as a server with --budgets learn loads it; what is learned is kept beside the model."""
    own = {"graphs": options.graphs, "device": options.device, "max_budget_tokens": options.max_budget_tokens}
    own["state_dir"] = model
    loaded = load_model(ServeSettings(model=str(model), budgets="learn", **own), metrics)
    exempt_loaded(getLogger("vitwire"))  # as a server does
    return loaded


def main() -> None:
    options = _parser().parse_args()
    sys.setswitchinterval(SWITCH_SECONDS)
    # Changes begin when this says so, and end with the new budgets in use.
    vars(learning).update(_FIT_EVERY=1 << 60, gain=lambda *_: 0.1)
    named = {name: getattr(options, name) for name in ("model", "tiny", "graphs", "images", "seconds")}
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu"
    report, metrics = Report("learning", options.out, {**named, "device": device}), Metrics()
    with tempfile.TemporaryDirectory(prefix="vitwire-") as folder:
        model = towers.published(options.model, Path(folder), tiny=options.tiny)
        start = time.perf_counter()
        bench = Bench(loaded(model, options, metrics), metrics, report, options)
        report.note("loaded_seconds", round(time.perf_counter() - start, 1))
        try:
            for count, way in product(options.clients, options.ways):
                bench.run(count, way)
        finally:
            bench.stop()
        bench.replays(loaded(model, options, Metrics()).planner)
    report.end(TITLES)


if __name__ == "__main__":
    main()
