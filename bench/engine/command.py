"""`make engine-bench`: vLLM with its own tower, and beside an encoder on the same device.

`local` is `vllm serve` alone on the device. `beside` is `vllm serve` with Vitwire's EC connector, a Vitwire server on
the same device and `vitwire router` in front. Both have the same cores and the same device memory. `again` is local
once more, the control. They are started one after the other, and clients in other processes send each the same streams
of chat completions with photographs. A document that is there is continued. The last line of stdout is one JSON
document.
"""

import argparse
import sys
import traceback
from contextlib import ExitStack
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from zlib import crc32

from bench.commands import ClientFailed
from bench.engine import document
from bench.engine.answers import Answer, figures, spans
from bench.engine.clients import Clients, clients
from bench.engine.cores import cards, device_memory, divided, used
from bench.engine.limits import Clock, OutOfTime, limited
from bench.engine.loads import Load
from bench.engine.options import COMPARED, options_of
from bench.engine.photos import Prompts
from bench.engine.serving import Failed, Settings
from bench.engine.setups import Setup, started, written
from bench.engine.sweep import swept
from bench.report import Report

TITLES = {
    "sweep": "settings of local: each was tried on top of those that were kept",
    "starts": "setups that were started",
    "memory": "MiB of the device",
    "streams": "streams of requests; *_cpu_ms: milliseconds of processors for a request",
    "spans": "milliseconds between the moments of each request with images",
    "against_local": "ratios to local of the same sitting; again is the control",
    "goodput": "highest requests/s within both bounds of p99",
    "sittings": "local, as a ratio to the first sitting's",
}
Row = dict[str, Any]
_WARM_UP = 48
_CLOSED_RATE = 16
"""Requests a second that a closed loop is assumed to answer: less than half of the 40 that one did with 32 in flight,
as a stream that is left out although there was time for it costs less than one that is cut off."""


def main() -> None:
    """Exits with 1 if the run ended early; what was measured until then is printed."""
    options = options_of(__doc__)
    try:
        if options.merge:
            finished(Report("engine", options.out, *document.merged(options.merge)))
            return
        settings = {name: getattr(options, name) for name in COMPARED}
        settings |= {"local": options.local.row(), "beside": options.beside.row()}
        earlier = document.read(options.out, settings) if options.out else {}
    except document.Unlike as error:
        sys.exit(f"engine-bench: {error}")
    report = Report("engine", options.out, {**described(), "settings": settings}, earlier)
    clock = Clock(options.time_limit)

    with limited(clock, lambda: finished(report)):
        try:
            Bench(report, options, clock).run()
        except (OutOfTime, KeyboardInterrupt, Exception) as error:  # noqa: BLE001 - what was measured is worth more
            if not isinstance(error, OutOfTime | KeyboardInterrupt | Failed | ClientFailed):
                traceback.print_exception(error)
            report.note("error", f"{type(error).__name__}: {error}")
    finished(report)
    sys.exit(int("error" in report.document()))


def finished(report: Report) -> None:
    """Add the tables that follow from the streams, and print all."""
    for name, rows in document.tables(report.document().get("streams", [])).items():
        report.replace(name, rows)
    report.end(TITLES)


def described() -> Row:
    """The devices and versions."""
    versions = {}
    for package in ("vllm", "nixl", "uvloop"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = ""
    return {"devices": [{name: card[name] for name in ("name", "driver", "total_mib")} for card in cards()], **versions}


def sitting() -> str:
    """Which boot of which machine, with which devices, on which day: streams of one sitting are compared."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    cards_ = "".join(card["uuid"] for card in cards())
    return f"{date.today()}-{crc32((boot + cards_).encode()):08x}"


class Bench:
    """Starts setups one after the other, and sends streams of requests until the time is over."""

    def __init__(self, report: Report, options: argparse.Namespace, clock: Clock) -> None:
        self._report = report
        self._options = options
        self._clock = clock
        self._client_cores, self._cores = divided(options.clients)
        self._sitting = sitting()
        report.note("cores_of_a_setup", len(self._cores))

    def run(self) -> None:
        """Raises Failed, ClientFailed and OutOfTime."""
        self._options.model = written(self._options)
        with clients(self._options.clients, self._client_cores) as sending:
            if self._options.sweep:
                self._sweep(sending)
                return
            for number, name in enumerate(self._options.order):
                self._setup(sending, number, name)

    def _sweep(self, sending: Clients) -> None:
        """The settings found are `local` of the document, for `--local`."""

        def probe(settings: Settings) -> Row:
            size, load = self._options.sizes[0], self._options.probe
            try:
                with ExitStack() as stack:
                    setup = self._started(stack, "local", settings)
                    self._sent(sending, setup, size, Load.of("c8"), _WARM_UP, "warm-up")
                    answers = self._sent(sending, setup, size, load, self._options.probe_requests, "probe")
                    return {"size": size, "load": str(load), **figures(answers, load)}
            except Failed as error:
                return {"error": str(error)[-600:]}

        def note(row: Row, best: Settings) -> None:
            self._report.add("sweep", row)
            self._report.note("local_so_far", best.row())

        rows, needed = self._report.document().get("sweep", []), self._options.start_seconds + 20
        best, is_over = swept(probe, rows, note, lambda: self._clock.left > needed)
        if is_over:
            self._report.note("local", best.row())
        else:
            self._report.skip("the rest of the sweep", "no time; run it again with the same --out")

    def _setup(self, sending: Clients, number: int, name: str) -> None:
        """Start it if a stream of it is missing."""
        options = self._options
        places = [
            {"sitting": self._sitting, "start": number, "setup": name, "size": size, "load": str(load)}
            for size in options.sizes
            for load in options.loads
        ]
        missing = [place for place in places if not self._has(place)]
        needed = options.start_seconds + self._expected(missing[0]) if missing else 0.0
        if missing and self._clock.left < needed:
            self._report.skip(f"{number} {name}", f"no time to start it: {needed:.0f} s, {self._clock.left:.0f} s left")
            return
        if not missing:
            return
        with ExitStack() as stack:
            setup = self._started(stack, name, options.local)
            where = [f"{card['name']}, driver {card['driver']}" for card in cards()[: options.devices]]
            self._report.add("starts", {"sitting": self._sitting, "start": number, **setup.described, "devices": where})
            self._memory(setup, number, "ready")
            for size in dict.fromkeys(place["size"] for place in missing):
                self._sent(sending, setup, size, Load.of("c8"), _WARM_UP, "warm-up")
                for place in (place for place in missing if place["size"] == size):
                    if self._clock.left < self._expected(place):
                        self._report.skip(" ".join(map(str, place.values())), "no time")
                        continue
                    self._stream(sending, setup, place)
            self._memory(setup, number, "after its streams")

    def _started(self, stack: ExitStack, name: str, settings: Settings) -> Setup:
        return stack.enter_context(started(name, self._options, settings, self._cores, self._clock.end))

    def _memory(self, setup: Setup, number: int, when: str) -> None:
        held = device_memory(setup.groups)
        self._report.add("memory", {"start": number, "setup": setup.name, "when": when, **held})

    def _has(self, place: Row) -> bool:
        """Whether the stream is in the document, of any sitting."""
        rows = self._report.document().get("streams", [])
        return any(all(row[key] == place[key] for key in place if key != "sitting") for row in rows)

    def _expected(self, place: Row) -> float:
        load, requests = Load.of(place["load"]), int(self._options.requests)
        return 5 + requests / (_CLOSED_RATE if load.closed else load.amount)

    def _stream(self, sending: Clients, setup: Setup, place: Row) -> None:
        """Measure it, and write it down unless a process of the setup died. Raises Failed."""
        load, label = Load.of(place["load"]), f"{place['size']}-{place['load']}"
        groups = setup.groups | {"client": sending.pids}
        before, counted = used(groups), setup.counters()
        answers = self._sent(sending, setup, place["size"], load, self._options.requests, label)
        self._failures(place, answers)
        setup.check()
        after, good = used(groups), sum(not answer.error for answer in answers)
        counts = {name: value - counted.get(name, 0.0) for name, value in setup.counters().items()}
        cpu = {name: 1e3 * (after[name] - before[name]) / max(1, good) for name in groups}
        row = place | figures(answers, load)
        row |= {"cpu_ms": round(sum(cpu.values()) - cpu["client"], 2)}
        row |= {f"{name}_cpu_ms": round(value, 2) for name, value in cpu.items()}
        for name in ("queue", "prefill"):
            if count := counts.get(f"request_{name}_time_seconds_count"):
                row[f"{name}_mean_ms"] = round(1e3 * counts[f"request_{name}_time_seconds_sum"] / count, 2)
        connector = {name: count for name, count in counts.items() if name.startswith("vitwire") and count}
        self._report.add("streams", row | ({"connector": connector} if connector else {}))
        if found := spans(answers, setup.reached(label), load):
            self._report.add("spans", place | found)

    def _sent(self, sending: Clients, setup: Setup, size: str, load: Load, count: int, label: str) -> list[Answer]:
        """The same stream for each setup. Raises Failed if all of its requests failed, or the setup did."""
        options = self._options
        seed = crc32(f"{size} {load} {label}".encode())
        prompts = Prompts(size, seed, options.text, options.tokens, options.repeats)
        sending.prepared(prompts, count, load)
        answers = sending.ran(setup.urls, load, label, self._clock.left)
        if all(answer.error for answer in answers):
            setup.check()
            raise Failed(f"{setup.name}: every request of {size} {load} ({label}) failed: {answers[0].error}")
        return answers

    def _failures(self, place: Row, answers: list[Answer]) -> None:
        """Each kind of error once, with how often it came."""
        errors = [answer.error for answer in answers if answer.error]
        for error in dict.fromkeys(errors):
            self._report.skip(f"{errors.count(error)} requests of {' '.join(map(str, place.values()))}", error)
