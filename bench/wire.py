"""`make wire-bench`: what the service costs, on a CPU and without a real tower's time.

Round trips through a server whose tower costs nothing, beside a bare gRPC server that reads and writes the same bytes
in the same messages; a real tower through the service, beside the same tower in process; small items and health checks
beside large ones. Whatever is compared alternates within one run, with separate client processes. The last line
of stdout is one JSON document.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench import busy_cores, large_image, round_trips, towers
from bench.alternation import alternated, calls_within, steady
from bench.client_processes import ClientProcess, Measured, loaded, prepared
from bench.report import Report

from servers import ServerProcess, serving

NOOP = (str(Path(__file__).with_name("noop_server.py")),)
STAND_INS = {"narrow": "wide", "half": "wide", "real": "small"}
"""What `--quick` uses instead."""
REAL = ("-m", "vitwire_server")
QUIET = ("--canary-seconds", "0", "--log-level", "warning")
"""Nothing runs but what is measured."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Small towers are not faster with more, and threads that spin would disturb what is measured."""
TITLES = {
    "trips": "round trips: milliseconds a call, over a bare gRPC server and through the service with a no-op tower",
    "cpu": "seconds of processors for each GB that went up and down",
    "inline": "one image of 1024 x 1024 in flight: milliseconds a call, and the client's own steps",
    "rendering": "its rows for vLLM: milliseconds, and ratio to base64 alone",
    "small": "one small item at a time: p50 in milliseconds, through the service and of the bare tower",
    "beside": "small items and health checks, alone and beside large items (milliseconds)",
    "waiting": "threads that sleep at barriers, and that spin, on idle and busy cores (milliseconds)",
    "batches": "a real tower: seconds in process over seconds through the service (1 is as fast)",
}
Row = dict[str, Any]


def main() -> None:
    options = _parser().parse_args()
    parameters = {"seconds": options.seconds, "turns": options.turns, "layers": options.layers}
    report = Report("wire", options.out, parameters | {"server_flags": options.server_flags})
    with tempfile.TemporaryDirectory(prefix="vitwire-") as folder, ExitStack() as stack:
        bench = Bench(report, options, Path(folder), stack)
        for processes in options.rpc_processes:
            bench.run(processes)
        bench.neighbours()
    report.end(TITLES)


class Bench:
    """Measures one number of RPC processes after the other on the same checkpoints."""

    def __init__(self, report: Report, options: argparse.Namespace, folder: Path, stack: ExitStack) -> None:
        """Towers in process, which are loaded once, are closed with `stack`."""
        self._stack = stack
        self._folder = folder
        self._towers: dict[str, ClientProcess] = {}
        self._report = report
        self._options = options
        self._models = {
            "wide": towers.with_rows_of(4096, 3, folder / "wide"),
            "small": towers.small(folder / "small"),
        }
        if not options.quick:
            self._models["narrow"] = towers.with_rows_of(64, 0, folder / "narrow")
            self._models["half"] = towers.with_rows_of(2048, 3, folder / "half")
            self._models["real"] = towers.with_blocks(options.layers, folder / "real")

    def run(self, processes: int) -> None:
        """All sections with this many RPC processes."""
        if self._options.parts == ["waiting"]:
            return
        shape = {"rpc_processes": processes}
        measured: dict[str, Callable[[dict[str, ServerProcess]], Iterable[Row]]] = {
            "inline": partial(self._inline, shape),
            "small": lambda servers: [self._small(servers["small"])],
            "beside": lambda servers: self._beside(servers["wide"]),
            "batches": lambda servers: [self._batches(servers["real"])],
        }
        with self._serving(("--rpc-processes", str(processes))) as servers:
            if "trips" in self._options.parts:
                for name in ("narrow", "wide"):
                    for table, row in round_trips.measured(servers[name], name, self._options):
                        self._report.add(table, shape | row)
            for part in (each for each in measured if each in self._options.parts):
                for row in measured[part](servers):
                    self._report.add(part, shape | row)

    def neighbours(self) -> None:
        """One process beside busy cores."""
        if "waiting" in self._options.parts:
            for row in busy_cores.waiting(self._models["small"], self._options):
                self._report.add("waiting", row)

    @contextmanager
    def _serving(self, flags: Sequence[str]) -> Iterator[dict[str, ServerProcess]]:
        """A server for each checkpoint; those that do not serve cost no time."""
        common = (*QUIET, *flags, *self._options.server_flags.split())
        with ExitStack() as stack:
            servers = {}
            for name, model in self._models.items():
                program = NOOP if name in ("narrow", "half", "wide") else REAL
                words = (*common, "--unix-socket", str(self._socket(name)))
                wrapper = () if name == "real" else ("env", *(f"{key}={value}" for key, value in ONE_THREAD.items()))
                starting = serving(model, *words, wait=False, program=program, wrapper=wrapper)
                servers[name] = stack.enter_context(starting)
            for server in servers.values():
                server.wait_for("ready: ")
            yield {**servers, **{name: servers[other] for name, other in STAND_INS.items() if name not in servers}}

    def _socket(self, name: str) -> Path:
        """Where the server of a model listens besides its port."""
        return self._folder / f"{name}.sock"

    def _inline(self, shape: Row, servers: Mapping[str, ServerProcess]) -> Iterator[Row]:
        """Rows of 16.8 and 33.6 MB; what renders them does not depend on the processes of the server."""
        side = 64 if self._options.quick else 1024
        for name in ("half", "wide"):
            own = name if name in self._models else STAND_INS[name]
            yield from large_image.streams(servers[name], self._socket(own), side, self._options)
        if shape["rpc_processes"] == self._options.rpc_processes[0]:
            for row in large_image.rendering(servers["wide"], side, self._options):
                self._report.add("rendering", row)

    def _tower(self, name: str) -> ClientProcess:
        """A process that has the engine of this server, and no service."""
        name = name if name in self._models else STAND_INS[name]
        settings: Row = {"model": str(self._models[name]), "device": "cpu"}
        if name not in self._towers:
            client = ClientProcess("tower", {} if name == "real" else ONE_THREAD, **settings)
            self._towers[name] = self._stack.enter_context(client)
        return self._towers[name]

    # -- one small item --------------------------------------------------------------------------------

    def _small(self, server: ServerProcess) -> Row:
        """A small item through the service and on the same tower in process, in alternation."""
        with ClientProcess("client", target=server.target) as library:
            clients = {"tower": self._tower("small"), "client": library}
            prepared(list(clients.values()), {"side": 64})
            times = alternated(clients, {"tower": [], "client": [server.process.pid]}, 1, self._options)
        tower_ms, service_ms = (round(1e3 * times[name].seconds, 3) for name in clients)
        return {"tower_ms": tower_ms, "service_ms": service_ms, "overhead_ms": round(service_ms - tower_ms, 3)}

    # -- beside large items ----------------------------------------------------------------------------

    def _beside(self, server: ServerProcess) -> Iterator[Row]:
        """Small items and health checks, 100 a second at most, alone and beside four large items in flight."""
        with ExitStack() as stack:
            small, bulk, health = (
                stack.enter_context(ClientProcess(kind, target=server.target))
                for kind in ("client", "client", "health")
            )
            clients = {"small item": small, "health": health}
            prepared(list(clients.values()), {"side": 64})
            prepared([bulk], {"side": 1024, "pixels": "float16"})

            def measured(client: ClientProcess) -> Measured:
                return loaded([client], 1, self._options.seconds, [server.process.pid], ramp=0.3, pause=0.01)

            for name, client in clients.items():
                alone = measured(client)
                bulk.send(run={"in_flight": 4, "stop": time.monotonic() + self._options.seconds + 0.6})
                beside = measured(client)
                bulk.answer()
                yield {
                    "call": name,
                    "alone_p50_ms": alone.milliseconds(0.5),
                    "alone_p99_ms": alone.milliseconds(0.99),
                    "beside_p50_ms": beside.milliseconds(0.5),
                    "beside_p99_ms": beside.milliseconds(0.99),
                    "errors": alone.errors | beside.errors,
                }

    # -- batches of a real tower -----------------------------------------------------------------------

    def _batches(self, server: ServerProcess) -> Row:
        """Requests of the same images through the service, two in flight, and in process, in alternation."""
        images = 2
        work = {"side": 64 if self._options.quick else 448, "images": images}
        bare = self._tower("real")
        with ClientProcess("client", target=server.target) as library:
            prepared([bare, library], work)
            calls = max(3, calls_within(bare, 1, self._options))
            before = _batch_items(server)
            ratios, spent = [], []
            for _ in range(self._options.turns):
                in_process = steady(bare, 1, calls)
                through = steady(library, 2, calls)
                ratios.append(in_process / through)
                spent.append((in_process, through))
            batches, items = (now - then for now, then in zip(_batch_items(server), before, strict=True))
        in_process_ms, service_ms = (round(1e3 * median(each), 1) for each in zip(*spent, strict=True))
        return {
            "images_per_request": images,
            "items_per_batch": round(items / batches, 2) if batches else None,
            "in_process_ms": in_process_ms,
            "service_ms": service_ms,
            "in_process_over_service": round(median(ratios), 3),
            "fastest_over_fastest": round(min(own for own, _ in spent) / min(served for _, served in spent), 3),
            "lowest": round(min(ratios), 3),
            "highest": round(max(ratios), 3),
        }


def _batch_items(server: ServerProcess) -> tuple[float, float]:
    return server.metric("vitwire_batch_items_count"), server.metric("vitwire_batch_items_sum")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("wire-bench", description=__doc__)
    parser.add_argument("--rpc-processes", nargs="+", type=int, default=[1, 2], help="RPC processes of the servers")
    parts = ["trips", "inline", "small", "beside", "batches", "waiting"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--server-flags", default="", help="more flags of vitwire-server serve, in one argument")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each path of a row, in all its turns")
    parser.add_argument("--turns", type=int, default=5, help="turns of each path of a row")
    parser.add_argument("--layers", type=int, default=2, help="blocks of the real tower")
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it runs, measures nothing")
    parser.add_argument("--out", type=Path, help="write the JSON document here too, after each row")
    return parser


if __name__ == "__main__":
    main()
