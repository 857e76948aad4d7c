"""`python bench/learning.py`: latency of requests while a server replaces its budgets, and what the steps take.

A published tower with random weights is served by engine, scheduler and learner in this process. Each client sends one
image after the other, in the sizes of `sizes.py`. All budgets but the largest are replaced by slightly smaller ones,
which is more than what a fit proposes: once with captures on another thread, as a server makes them, and once with
captures between batches, for comparison. The last line of stdout is one JSON document.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
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

from vitwire_server.config.settings import ServeSettings
from vitwire_server.core.errors import EncoderError
from vitwire_server.core.grids import Footprint
from vitwire_server.core.items import Item
from vitwire_server.core.reports import Outcome
from vitwire_server.fitting.ladders import Proposal
from vitwire_server.observe.metrics import Metrics
from vitwire_server.process.loading import LoadedModel, load_model
from vitwire_server.runtime.graphs import Graph
from vitwire_server.runtime.ladders import learning
from vitwire_server.runtime.ladders.calibration import sample_items
from vitwire_server.runtime.ladders.learning import LadderLearner
from vitwire_server.runtime.ladders.live_capture import LiveCapture
from vitwire_server.scheduling.planner import Planner
from vitwire_server.scheduling.scheduler import Scheduler
from vitwire_server.scheduling.tickets import Entry, Ticket

SHRUNK = 0.96
"""Of a budget's tokens, those of the one that replaces it."""
SWITCH_SECONDS = 0.0005
"""As the server sets it."""
TITLES = {"latency": "latency that clients see, ms", "steps": "steps of the changes, ms", "changes": "changes"}
KINDS = ((LiveCapture, "_record"), (LiveCapture, "timed"), (LiveCapture, "keep"), (Graph, "warm_up"))
"""Methods that are timed by name, as the kinds of steps. The first runs on another thread."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request that was answered."""

    image: int
    began: float
    seconds: float
    failed: bool


class Between(Executor):
    """Captures on the engine thread, and so between batches."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        try:
            done.set_result(call(*arguments, **named))
        except Exception as error:  # noqa: BLE001 - it belongs to the caller
            done.set_exception(error)
        return done


@dataclass(slots=True)
class Watched:
    """A learner whose steps are timed, and which begins a change when asked."""

    learner: LadderLearner
    calls: list[float] = field(default_factory=list)
    """Seconds of each step, on the engine thread."""
    idle: Event = field(default_factory=Event)
    """No change is under way."""

    def planned(self, window: Sequence[Footprint], taken: int) -> None:
        self.learner.planned(window, taken)

    def seconds_until_due(self) -> float:
        return self.learner.seconds_until_due()

    def step(self, *, idle: bool) -> Planner | None:
        start = time.perf_counter()
        planner = self.learner.step(idle=idle)
        self.calls.append(time.perf_counter() - start)
        if planner is None and self.learner._change is None:
            self.idle.set()
        return planner

    def replaced(self) -> None:
        start = time.perf_counter()
        self.learner.replaced()
        self.calls.append(time.perf_counter() - start)
        self.idle.set()

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
        self.ways: dict[str, Executor] = {"on another thread": model.learner._capture._worker, "between": Between()}
        """Where captures run."""
        self.scheduler = Scheduler(model.engine, model.planner, metrics.engine, learner=self.watched)
        grids = [grid for request in trace(options.images, seed=1) for grid in request][: options.images]
        self.items = sample_items(model.tower, grids)
        self.model = model
        self._report, self._options = report, options
        self._engine = Thread(target=self.scheduler.run)
        self._engine.start()

    def stop(self) -> None:
        self.scheduler.intake.close()
        self._engine.join()

    def run(self, count: int, way: str) -> None:
        """Clients before, during and after a change."""
        clients, watched = Clients(self.scheduler, self.items, count), self.watched
        watched.learner._capture._worker = self.ways[way]
        key = {"clients": count, "captures": way}
        time.sleep(1)  # caches of metadata, and of the allocator
        with timed_kinds() as kinds:
            marks = [time.monotonic()]
            time.sleep(self._options.seconds)
            marks.append(time.monotonic())
            watched.calls.clear()
            watched.begin(self._sizes())
            finished = watched.idle.wait(self._options.most)
            marks.append(time.monotonic())
            time.sleep(self._options.seconds)
            marks.append(time.monotonic())
            clients.stop()
        self._latencies(key, clients.calls, marks)
        self._steps(key, kinds)
        row = key | {
            "finished": finished,
            "engine_s": round(sum(watched.calls), 2),
            "over_s": round(marks[2] - marks[1], 1),
        }
        row |= {"steps": len(watched.calls), "longest_step_ms": round(1e3 * max(watched.calls), 1)}
        self._report.add("changes", row)

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
                    "over_median_p99": _ms(sorted(late), 0.99),
                    "over_median_most": _ms(sorted(late), 1.0),
                    "over_slowest_most": _ms(sorted(later), 1.0),
                },
            )

    def _steps(self, key: dict[str, Any], kinds: dict[str, list[float]]) -> None:
        for kind, seconds in kinds.items():
            row = {"step": kind, "count": len(seconds)}
            ordered = sorted(seconds)
            self._report.add("steps", key | row | {"p50": _ms(ordered, 0.5), "longest": _ms(ordered, 1.0)})


@contextmanager
def timed_kinds() -> Iterator[dict[str, list[float]]]:
    """Seconds of each kind of step meanwhile."""
    seconds: dict[str, list[float]] = {}
    stock: list[tuple[Any, str, Any]] = []
    for owner, name in KINDS:
        method = getattr(owner, name)
        stock.append((owner, name, method))

        def timed(*arguments: Any, method: Any = method, name: str = name) -> Any:
            start = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                seconds.setdefault(name.strip("_"), []).append(time.perf_counter() - start)

        setattr(owner, name, timed)
    yield seconds
    for owner, name, method in stock:
        setattr(owner, name, method)


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
    add("--most", type=float, default=40, help="most seconds of a change")
    add("--out", type=Path, help="write the document to this file as well")
    return parser


def loaded(folder: Path, options: argparse.Namespace, metrics: Metrics) -> LoadedModel:
    """The tower as a server with --budgets learn loads it."""
    model = towers.published(options.model, folder, tiny=options.tiny)
    own = {"graphs": options.graphs, "device": options.device, "max_budget_tokens": options.max_budget_tokens}
    return load_model(ServeSettings(model=str(model), budgets="learn", **own), metrics)


def main() -> None:
    options = _parser().parse_args()
    sys.setswitchinterval(SWITCH_SECONDS)
    # Changes begin when this says so, and end with the new budgets in use.
    vars(learning).update(_FIT_EVERY=1 << 60, gain=lambda *_: 0.1)
    named = {name: getattr(options, name) for name in ("model", "tiny", "graphs", "images", "seconds")}
    device = torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu"
    report, metrics = Report("learning", options.out, {**named, "device": device}), Metrics()
    with tempfile.TemporaryDirectory(prefix="vitwire-") as folder:
        start = time.perf_counter()
        bench = Bench(loaded(Path(folder), options, metrics), metrics, report, options)
        report.note("loaded_seconds", round(time.perf_counter() - start, 1))
        try:
            for count, way in product(options.clients, bench.ways):
                bench.run(count, way)
        finally:
            bench.stop()
    report.end(TITLES)


if __name__ == "__main__":
    main()
