"""Setups of engines and encoders under a sweep of loads: `--setups 4+0,3+1,2+2`."""

import argparse
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.client_processes import cpu_seconds
from bench.engine import equal_p99, vllm_engine
from bench.engine.answers import Answer, Row, between_tokens, figures, rate, timeline
from bench.engine.busy import Busy
from bench.engine.encoders import Encoders, environment, starting, written
from bench.engine.equal_p99 import Point
from bench.engine.limits import Clock
from bench.engine.loads import Load, Size
from bench.engine.seat import BESIDE, OVER, ClientPlace, EnginePlace, Seat, SeatFailed, Share, answers_of, ask, seated
from bench.engine.splits import Group, Split, grouped, shares
from bench.report import Report

if TYPE_CHECKING:
    from concurrent.futures import Future

TITLES = {
    "setups": "engines+encoders under each load; busy: share of the time in which each device computed",
    "equal_p99": "requests/s of a setup, and of all its devices as local engines, within the same p99 of TTFT",
    "turns": "ratio of these rates from this load on (at the same load), or from this p99 on (at equal p99)",
}
_START_SECONDS = 300
_SECONDS = 150
"""For the preparation of a stream, and for the stream."""
_WARM_UP = 16
"""Requests of each engine, all in flight at once, before its first stream of a size."""
_ROUNDS = 4
"""Of the requests in flight, at least."""


@dataclass(frozen=True, slots=True)
class Crew:
    """The processes of a group of setups, as far as they started."""

    engines: Sequence[Seat]
    clients: Mapping[str, Sequence[Seat]]
    """Of each engine by source; the engines themselves if requests do not go by HTTP."""
    encoders: Encoders | None

    def has(self, split: Split) -> bool:
        return len(self.engines) >= split.engines and bool(self.encoders or not split.encoders)


class Streamed(NamedTuple):
    """A stream over several engines."""

    parts: Sequence[tuple[Load, Sequence[Answer]]]
    """The load and the answers of each."""
    cpu_seconds: float
    """Of all processes."""


class Sweep:
    """Measures one setup after another until the time is over."""

    def __init__(self, report: Report, options: argparse.Namespace, clock: Clock) -> None:
        self._report = report
        self._options = options
        self._clock = clock

    def run(self) -> None:
        """What fails is left out, and its reason reported; a Report has what was measured until then."""
        with Busy() as busy:
            for language in self._options.language:
                try:
                    for group in grouped(self._options.setups):
                        self._group(language, group, busy)
                finally:
                    for source, size in product(self._options.sources, self._options.sizes):
                        self._compare({"language": language, "source": source, "size": str(size)})

    def _group(self, language: str, group: Group, busy: Busy) -> None:
        try:
            with self._started(language, group) as crew:
                self._measure(language, group, crew, busy)
        except (SeatFailed, RuntimeError, subprocess.SubprocessError) as error:
            self._report.skip(f"{language} {' '.join(map(str, group.splits))}", str(error)[-1000:])

    @contextmanager
    def _started(self, language: str, group: Group) -> Iterator[Crew]:
        """Engines and encoders start at the same time."""
        options, began = self._options, time.monotonic()
        model = written(options, language)
        with ExitStack() as stack:
            target, server = "", None
            if group.encoder_devices:
                devices = ["cpu" if options.tiny else f"cuda:{index}" for index in group.encoder_devices]
                flags = options.server_flags.split()
                target, server = stack.enter_context(starting(model, devices, flags, environment(options)))
            places = [self._place(index, model, target) for index in range(group.engines)]
            engines = stack.enter_context(seated(places))
            described = [self._began(index, seat) for index, seat in enumerate(engines)]
            described = list(takewhile(bool, described))  # an engine is used with all before it
            engines = engines[: len(described)]
            clients = {"patches": engines}
            if "jpeg" in options.sources:
                of_each = [ClientPlace(index, each["urls"]) for index, each in enumerate(described)]
                clients["jpeg"] = stack.enter_context(seated(of_each))
                answers_of(clients["jpeg"], _SECONDS)
            encoders = self._ready(server) if server else None
            self._report.add(
                "starts",
                {"language": language, "setups": " ".join(map(str, group.splits))}
                | {"seconds": round(time.monotonic() - began, 1)},
            )
            yield Crew(engines, clients, encoders)

    def _place(self, index: int, model: Path, target: str) -> EnginePlace:
        options = self._options
        images = max(4, *(size.images for size in options.sizes))
        arguments = vllm_engine.arguments(model, target, images=images, delivery=options.delivery)
        device = None if options.tiny else index
        arguments |= options.engine_args
        return EnginePlace(index, device, model, target, arguments, options.sources, environment(options))

    def _began(self, index: int, seat: Seat) -> Row:
        """An engine's description; empty if it did not start."""
        try:
            described: Row = seat.answer(self._start_seconds())
        except SeatFailed as error:
            self._report.skip(f"engine {index}", str(error)[-1000:])
            return {}
        for name in ("engine", "device"):
            self._report.note(name, described[name])
        return described

    def _start_seconds(self) -> float:
        """What does not start leaves time to measure the rest."""
        return max(1.0, min(_START_SECONDS, self._clock.left * 3 / 4))

    def _ready(self, server: "Future[Encoders]") -> Encoders | None:
        """None if they did not start, as above."""
        try:
            encoders = server.result()
            encoders.wait(self._start_seconds())
        except RuntimeError as error:
            self._report.skip("encoders", str(error)[-1000:])
            return None
        return encoders

    def _measure(self, language: str, group: Group, crew: Crew, busy: Busy) -> None:
        """Setups of a stage take turns at each load; encoders that it does not have are stopped before."""
        for split in group.splits:
            if not crew.has(split):
                self._report.skip(f"{language} {split}", "some of it did not start")
        for stage in group.stages:
            if crew.encoders:
                crew.encoders.keep(max(split.encoders for split in stage))
            self._take_turns(language, [split for split in stage if crew.has(split)], crew, busy)

    def _take_turns(self, language: str, splits: Sequence[Split], crew: Crew, busy: Busy) -> None:
        options = self._options
        for source, size, load in product(options.sources, options.sizes, (None, *options.loads)):
            for split in splits:
                place = {"language": language, "source": source, "size": str(size), "setup": str(split)}
                place["load"] = str(load or "warm-up")
                if self._clock.left < options.reserve:
                    self._report.skip(" ".join(place.values()), "no time")
                    continue
                try:
                    if load:
                        self._row(place, split, load, crew, busy)
                    else:
                        warm = _WARM_UP * split.engines
                        self._stream(place, split, Load(closed=True, amount=warm), warm, crew)
                except (SeatFailed, OSError) as error:
                    self._report.skip(" ".join(place.values()), str(error)[-1000:])

    def _row(self, place: Row, split: Split, load: Load, crew: Crew, busy: Busy) -> None:
        """A load on a setup; with --itl the last one again, beside other generations."""
        encoders = crew.encoders if split.encoders else None
        before = encoders.busy_seconds() if encoders else 0.0
        stream = self._stream(place, split, load, self._requests(load), crew)
        answers = [answer for _, each in stream.parts for answer in each]
        begin, end = min(answer.start for answer in answers), max(answer.end for answer in answers)
        row = place | figures(answers, load)
        row["requests_per_s"] = round(sum(_rate(each, part) for part, each in stream.parts), 2)
        row["busy"] = busy.between(begin, end, range(split.devices))
        if encoders:
            computed = encoders.busy_seconds() - before
            row["encoders_busy"] = round(computed / (end - begin) / split.encoders, 3)
        row["cores"] = round(stream.cpu_seconds / (end - begin), 1)
        if self._options.itl and load == self._options.loads[-1]:
            row |= self._beside(place, split, load, crew)
        self._report.add("setups", row)
        self._report.add("timeline", place | timeline(answers))
        for error in {answer.error for answer in answers if answer.error}:
            self._report.skip(" ".join(place.values()), error)

    def _beside(self, place: Row, split: Split, load: Load, crew: Crew) -> Row:
        """Times between the tokens of generations that run during a load; none if something fails."""
        seats = crew.engines[: split.engines]
        try:
            try:
                ask(seats, [BESIDE] * len(seats), _SECONDS)
                self._stream(place, split, load, self._requests(load), crew)
            finally:
                others = ask(seats, [OVER] * len(seats), _SECONDS)
        except SeatFailed as error:
            self._report.skip(f"{' '.join(place.values())} --itl", str(error)[-1000:])
            return {}
        found = between_tokens([answer for each in others for answer in each])
        return {f"others_{name}": value for name, value in found.items()}

    def _requests(self, load: Load) -> int:
        """Of a stream: most of them run with as many others as the load has in flight."""
        least: int = self._options.requests
        return max(least, _ROUNDS * int(load.amount)) if load.closed else least

    def _stream(self, place: Row, split: Split, load: Load, requests: int, crew: Crew) -> Streamed:
        """One stream over the engines of a setup."""
        options, size = self._options, Size.of(place["size"])
        parts = shares(load, requests, split.engines)
        way = "reference" if split.encoders else "local"
        seats = crew.clients[place["source"]][: len(parts)]
        ask(seats, [Share(way, size, part, count, options.text, options.tokens) for part, count in parts], _SECONDS)
        spent = cpu_seconds([os.getpid()])
        answers = ask(seats, [time.monotonic() + 0.1] * len(seats), _SECONDS)
        spent = cpu_seconds([os.getpid()]) - spent
        return Streamed([(part, each) for (part, _), each in zip(parts, answers, strict=True)], spent)

    def _compare(self, place: Row) -> None:
        """Each setup with as many local engines as it has devices."""
        rows = [row for row in self._report.document().get("setups", []) if place.items() <= row.items()]
        for split in self._options.setups:
            ours, local = (_points(rows, each) for each in (split, split.local))
            if split == split.local or not ours or not local:
                continue
            at = place | {"setup": str(split)}
            equal = equal_p99.compared(ours, local)
            for row in equal:
                self._report.add("equal_p99", at | row)
            loads = {point.load: point.rate for point in local}
            same = [(point.load, point.rate, loads[point.load]) for point in ours if point.load in loads]
            within = [
                (f"p99 {row['ttft_p99_ms']} ms", row["requests_per_s"], row["local_requests_per_s"]) for row in equal
            ]
            for rates in (same, within):
                for row in equal_p99.turns(rates):
                    self._report.add("turns", at | row)


def _points(rows: Sequence[Row], split: Split) -> list[Point]:
    """Of a setup, in ascending order of the loads; without loads of which nothing succeeded."""
    own = [row for row in rows if row["setup"] == str(split) and "ttft_p99_ms" in row]
    own.sort(key=lambda row: Load.of(row["load"]).amount)
    return [Point(row["load"], row["requests_per_s"], row["ttft_p99_ms"]) for row in own]


def _rate(answers: Sequence[Answer], load: Load) -> float:
    good: Any = [answer for answer in answers if not answer.error]
    return rate(good, load) if good else 0.0
