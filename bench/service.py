"""`make service-bench`: servers under load, beside a bare gRPC server that moves the same bytes.

A published tower with random weights is served in each combination of `--models`, `--devices` and `--rpc-processes`.
Each server is started once and takes all loads, with each kind of client and way of delivery. A row is printed, and
`--out` written, as soon as it is measured. The last line of stdout is one JSON document.
"""

import argparse
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from os import kill
from pathlib import Path
from typing import Any

from bench import towers
from bench.fleet import RAMP, Client, DriverFailed, bare_servers, loaded, prepared
from bench.report import Report
from bench.service_options import parser
from bench.setups import READY_SECONDS, Load, Server, Setup, scaling, started
from bench.timeline import draw, traced

from servers import serving

TITLES = {
    "bare": "a bare gRPC server that moves the same bytes in the same messages: the ceiling",
    "rows": "the service",
    "scaling": "several devices against one, with as many requests in flight for each",
    "killed": "one process killed under load",
}
Row = dict[str, Any]


def main() -> None:
    options = parser(__doc__).parse_args()
    named = ("models", "tiny", "pixels", "image_tokens", "clients", "connections", "seconds", "flags")
    report = Report("service", options.out, {name: getattr(options, name) for name in named} | {"device": _device()})
    with tempfile.TemporaryDirectory(prefix="vitwire-") as folder:
        bench = Bench(report, options, options.checkpoints or Path(folder))
        for choice in product(options.models, options.devices, options.rpc_processes):
            bench.run(Setup(*choice))
        for row in scaling(report.document().get("rows", [])):
            report.add("scaling", row)
        if options.plot:
            bench.plot(Setup(options.models[0], options.devices[0], options.rpc_processes[-1]))
    report.end(TITLES)


class Bench:
    """Measures one setup after another until the time is over."""

    def __init__(self, report: Report, options: argparse.Namespace, folder: Path) -> None:
        self._report = report
        self._options = options
        self._folder = folder
        self._end = time.monotonic() + 60 * options.minutes
        self._ceilings: dict[tuple[str, Load, int], float] = {}
        """Calls a second of bare servers, by model, load and number of processes."""

    def run(self, setup: Setup) -> None:
        """All loads on one server."""
        if not self._has_time(str(setup)):
            return
        try:
            with started(self._checkpoint(setup.model), setup.devices, self._flags(setup)) as server:
                if not any(model == setup.model for model, _, _ in self._ceilings):
                    self._measure_ceilings(setup.model, server)
                for driver, delivery in self._clients():
                    if self._options.each_device and len(server.processes) > 1:
                        self._measure(setup, server, driver, delivery, used=1)
                    self._measure(setup, server, driver, delivery, used=len(server.processes))
                if self._options.kill and len(server.processes) > 1:
                    self._kill(setup, server)
        except (RuntimeError, DriverFailed) as error:  # a server or client did not start, or was not restarted
            self._report.skip(str(setup), str(error)[-1000:])

    def _flags(self, setup: Setup) -> list[str]:
        """Flags of the server."""
        nixl = any(each.startswith("nixl") for each in self._options.delivery)
        own = ["--rpc-processes", str(setup.rpc_processes), *(["--nixl"] if nixl else [])]
        return [*self._options.flags.split(), *own]

    def _clients(self) -> Iterator[tuple[str, str]]:
        """Kinds of clients with their ways of delivery; only the synchronous client takes rows by NIXL."""
        for delivery in self._options.delivery:
            if delivery == "stream":
                yield from ((driver, delivery) for driver in self._options.drivers)
            else:
                yield "client", delivery

    def _has_time(self, what: str) -> bool:
        if time.monotonic() < self._end:
            return True
        self._report.skip(what, "no time")
        return False

    def _checkpoint(self, model: str) -> Path:
        folder = self._folder / (model.replace(":", "_") + ("_tiny" if self._options.tiny else ""))
        if not towers.is_written(folder):
            towers.published(model, folder, tiny=self._options.tiny)
        towers.bounded(folder, self._options.image_tokens)
        return folder

    # -- the bare ceiling ------------------------------------------------------------------------------

    def _measure_ceilings(self, model: str, server: Server) -> None:
        """Bare servers under the same loads, while the service, which describes its messages, is idle."""
        with Client("raw", target=server.processes[0].target) as asked:
            sizes = {load: asked.ask(prepare=self._work(load)) for load in self._options.loads}
        for processes in self._options.bare:
            with ExitStack() as stack:
                target, pids = stack.enter_context(bare_servers(processes))
                own: Row = {"target": target, "model": server.processes[0].target}
                clients = [
                    stack.enter_context(Client("raw", connections=self._options.connections, **own))
                    for _ in range(self._options.clients)
                ]
                for load in self._options.loads:
                    if self._has_time(f"bare {processes} {load}"):
                        work = {**self._work(load), "answer": sizes[load]["answer"]}
                        rate = self._row("bare", {"model": model, "processes": processes}, load, clients, work, pids)
                        self._ceilings[model, load, processes] = rate["images_per_second"]

    def _work(self, load: Load) -> Row:
        return {"size": load.size, "pixels": load.pixels or self._options.pixels}

    # -- the service -----------------------------------------------------------------------------------

    def _measure(self, setup: Setup, server: Server, driver: str, delivery: str, used: int) -> None:
        """All loads with one kind of client, on the first `used` devices."""
        server, part = server.first(used), setup.first(used)
        own = {**part.row(), "delivery": delivery, "driver": driver}
        with ExitStack() as stack:
            clients = [
                stack.enter_context(Client(driver, **self._settings(setup, server, driver, delivery, number)))
                for number in range(self._options.clients)
            ]
            for each in self._options.loads:
                load = part.each(each) if self._options.each_device else each
                if not self._has_time(f"{own} {load}"):
                    continue
                try:
                    self._row("rows", own, load, clients, self._work(load), [server.root.process.pid], server)
                except DriverFailed as error:
                    self._report.skip(f"{own}", str(error))
                    return

    def _settings(self, setup: Setup, server: Server, driver: str, delivery: str, number: int) -> Row:
        """Arguments of the client process of this number; with nixl:cuda, clients take the setup's devices in turn."""
        if driver == "raw":
            return {"target": server.target, "connections": self._options.connections}
        if driver == "async":
            return {"target": server.target}
        way, _, device = delivery.partition(":")
        devices = setup.devices.split(",")
        device = devices[number % len(devices)] if device == "cuda" else device
        return {"target": server.target, "delivery": way, "device": device or None}

    def _row(
        self,
        section: str,
        own: Row,
        load: Load,
        clients: Sequence[Client],
        work: Row,
        pids: Sequence[int],
        server: Server | None = None,
    ) -> Row:
        """Measure a load that all clients share, and report it."""
        clients = clients[: load.in_flight]
        size = prepared(clients, work)
        busy: list[float] = []
        sample = (lambda: busy.append(server.busy_seconds())) if server else (lambda: None)
        measured = loaded(clients, load.in_flight, self._options.seconds, pids, sample=sample)
        nbytes = size["up"] + size["down"]
        row = {
            **own,
            **self._work(load),
            "in_flight": load.in_flight,
            "clients": len(clients),
            "images_per_second": round(measured.rate, 1),
            "tokens_per_second": round(measured.rate * size["tokens"]),
            "gb_per_second": round(measured.rate * nbytes / 1e9, 3),
            "p50_ms": measured.milliseconds(0.5),
            "p99_ms": measured.milliseconds(0.99),
            "server_cpu_ms": measured.server_milliseconds,
        }
        if server:
            row["busy"] = round((busy[1] - busy[0]) / measured.seconds / len(server.processes), 3)
            ceiling = self._ceilings.get((own["model"], load, own["rpc_processes"] * len(server.processes)))
            row["of_bare"] = round(measured.rate / ceiling, 3) if ceiling else None
        return self._report.add(section, row | measured.cpu_per_gigabyte(nbytes) | {"errors": measured.errors})

    # -- a process killed ------------------------------------------------------------------------------

    def _kill(self, setup: Setup, server: Server) -> None:
        """One process is killed under load: the clients' errors, and the time until its successor was ready."""
        load, supervisor = max(self._options.loads, key=lambda load: load.in_flight), server.root
        pid = supervisor.process.pid
        first = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        with ExitStack() as stack:
            clients = [stack.enter_context(Client("client", target=server.target)) for _ in range(load.in_flight)[:4]]
            prepared(clients, self._work(load))
            stop = time.monotonic() + RAMP + self._options.seconds
            for client in clients:
                client.send(run={"in_flight": max(1, load.in_flight // len(clients)), "stop": stop})
            time.sleep(RAMP)
            kill(first, signal.SIGKILL)
            died = time.monotonic()
            label = supervisor.wait_for(r"(\S+) exited unexpectedly \(SIGKILL\)")[1]
            supervisor.wait_for(rf"(?s)(\[{label}\] ready: .*){{2}}", READY_SECONDS)
            back = time.monotonic() - died
            answers = [client.answer() for client in clients]
        row = {"size": load.size, "in_flight": load.in_flight, "killed": label, "ready_again_seconds": round(back, 1)}
        errors = Counter(error for each in answers for error in each["error"])
        row |= {"requests": errors.total(), "errors": {error: count for error, count in errors.items() if error}}
        self._report.add("killed", setup.row() | row)

    # -- timeline --------------------------------------------------------------------------------------

    def plot(self, setup: Setup) -> None:
        """The stages of one batch under the largest load of the first size with several in flight."""
        if not self._has_time("timeline"):
            return
        setup = replace(setup, devices=setup.devices.split(",")[0])
        flags = self._flags(setup)
        load = max(self._options.loads, key=lambda load: (load.size == self._options.loads[0].size, load.in_flight))
        checkpoint = self._checkpoint(setup.model)
        try:
            batch = traced(
                lambda own: serving(checkpoint, "--device", setup.devices, *flags, *own),
                self._work(load),
                in_flight=load.in_flight,
                calls=10 * load.in_flight,
            )
            self._report.note("timeline_ms", batch.medians)
            draw(batch, self._options.plot, f"{load}, {setup}")
        except ImportError as error:
            self._report.skip("timeline", f"{error.name} is not installed")


def _device() -> str:
    import torch  # noqa: PLC0415 - seconds, for a name

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
