"""`make service-bench`: servers under load, beside a bare gRPC server that moves the same bytes.

A published tower with random weights is served in each combination of `--models`, `--devices`, `--rpc-processes` and
`--decode`. Each server is started once and takes all loads, with each kind of client and way of delivery. A row is
printed, and `--out` written, as soon as it is measured. The last line of stdout is one JSON document.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from bench import towers
from bench.client_processes import ClientProcess, bare_servers, loaded, prepared
from bench.commands import ClientFailed
from bench.report import Report
from bench.setups import Load, Server, Setup, parser, started

TITLES = {
    "bare": "a bare gRPC server that moves the same bytes in the same messages: the ceiling",
    "rows": "the service",
}
Row = dict[str, Any]


def main() -> None:
    options = parser(__doc__).parse_args()
    named = ("models", "tiny", "image_tokens", "clients", "connections", "seconds", "flags")
    report = Report("service", options.out, {name: getattr(options, name) for name in named} | {"device": _device()})
    with tempfile.TemporaryDirectory(prefix="vitwire-") as folder:
        bench = Bench(report, options, options.checkpoints or Path(folder))
        for choice in product(options.models, options.devices, options.rpc_processes, options.decode):
            bench.run(Setup(*choice))
    report.end(TITLES)
    raise SystemExit(bench.failed)


class Bench:
    """Measures one setup after another until the time is over."""

    def __init__(self, report: Report, options: argparse.Namespace, folder: Path) -> None:
        self._report = report
        self._options = options
        self._folder = folder
        self._end = time.monotonic() + 60 * options.minutes
        self.failed = False
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
                    self._measure(setup, server, driver, delivery)
        except (RuntimeError, ClientFailed) as error:  # a server or client did not start
            self.failed = True
            self._report.skip(str(setup), str(error)[-1000:])

    def _flags(self, setup: Setup) -> list[str]:
        """Flags of the server."""
        nixl = any(each.startswith("nixl") for each in self._options.delivery)
        own = ["--rpc-processes", str(setup.rpc_processes), "--decode", setup.decode, *(["--nixl"] if nixl else [])]
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
        folder = self._folder / (model + ("_tiny" if self._options.tiny else ""))
        return towers.published(model, folder, self._options.image_tokens, tiny=self._options.tiny)

    # -- the bare ceiling ------------------------------------------------------------------------------

    def _measure_ceilings(self, model: str, server: Server) -> None:
        """Bare servers under the same loads, while the service, which describes its messages, is idle."""
        with ClientProcess("raw", target=server.processes[0].target) as asked:
            sizes = {load: asked.ask(prepare=self._work(load)) for load in self._options.loads}
        for processes in self._options.bare:
            with ExitStack() as stack:
                target, pids = stack.enter_context(bare_servers(processes))
                own: Row = {"target": target, "model": server.processes[0].target}
                clients = [
                    stack.enter_context(ClientProcess("raw", connections=self._options.connections, **own))
                    for _ in range(self._options.clients)
                ]
                for load in self._options.loads:
                    if self._has_time(f"bare {processes} {load}"):
                        work = {**self._work(load), "answer": sizes[load]["answer"]}
                        row = self._row("bare", {"model": model, "processes": processes}, load, clients, work, pids)
                        rate = "clips_per_second" if load.pixels == "clip" else "images_per_second"
                        self._ceilings[model, load, processes] = row[rate]

    def _work(self, load: Load) -> Row:
        return {"size": load.size, "pixels": load.pixels}

    # -- the service -----------------------------------------------------------------------------------

    def _measure(self, setup: Setup, server: Server, driver: str, delivery: str) -> None:
        """All loads with one kind of client."""
        own = {**asdict(setup), "delivery": delivery, "driver": driver}
        with ExitStack() as stack:
            clients = [
                stack.enter_context(ClientProcess(driver, **self._settings(setup, server, driver, delivery, number)))
                for number in range(self._options.clients)
            ]
            for load in self._options.loads:
                if not self._has_time(f"{own} {load}"):
                    continue
                try:
                    self._row("rows", own, load, clients, self._work(load), [server.root.process.pid], server)
                except ClientFailed as error:
                    self._report.skip(f"{own}", str(error))
                    return

    def _settings(self, setup: Setup, server: Server, driver: str, delivery: str, number: int) -> Row:
        """Arguments of the client process of this number; with nixl:cuda, clients take the setup's devices in turn."""
        if driver == "raw":
            return {"target": server.target, "connections": self._options.connections}
        way, _, device = delivery.partition(":")
        devices = setup.devices.split(",")
        device = devices[number % len(devices)] if device == "cuda" else device
        return {"target": server.target, "delivery": way, "device": device or None}

    def _row(
        self,
        section: str,
        own: Row,
        load: Load,
        clients: Sequence[ClientProcess],
        work: Row,
        pids: Sequence[int],
        server: Server | None = None,
    ) -> Row:
        """Measure a load that all clients share, and report it."""
        clients = clients[: load.in_flight]
        size = prepared(clients, work)
        seen: list[tuple[float, float]] = []
        sample = (lambda: seen.append(server.counted())) if server else (lambda: None)
        measured = loaded(clients, load.in_flight, self._options.seconds, pids, sample=sample)
        nbytes = size["up"] + size["down"]
        row = {
            **own,
            **self._work(load),
            "in_flight": load.in_flight,
            "clients": len(clients),
            f"{'clips' if load.pixels == 'clip' else 'images'}_per_second": round(measured.rate, 1),
            "tokens_per_second": round(measured.rate * size["tokens"]),
            "gb_per_second": round(measured.rate * nbytes / 1e9, 3),
            "p50_ms": measured.milliseconds(0.5),
            "p99_ms": measured.milliseconds(0.99),
            "server_cpu_ms": measured.server_milliseconds,
        }
        if server:
            busy, decoded = (after - before for before, after in zip(*seen, strict=True))
            row["busy"] = round(busy / measured.seconds / len(server.processes), 3)
            row["decoded_on_device"] = round(decoded / max(1, len(measured.latencies)), 2)
            ceiling = self._ceilings.get((own["model"], load, own["rpc_processes"] * len(server.processes)))
            row["of_bare"] = round(measured.rate / ceiling, 3) if ceiling else None
        return self._report.add(section, row | measured.cpu_per_gigabyte(nbytes) | {"errors": measured.errors})


def _device() -> str:
    import torch  # noqa: PLC0415 - seconds, for a name

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
