"""`make wire-bench`: what the service costs, on a CPU and without a real tower's time.

Round trips through a server whose tower costs nothing, beside a bare gRPC server that reads and writes the same bytes
in the same messages; small items beside large ones. Whatever is compared alternates within one run, with separate
client processes. The last line of stdout is one JSON document.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench import round_trips, towers
from bench.client_processes import ClientProcess, Measured, loaded, prepared
from bench.report import Report

from servers import ServerProcess, serving

NOOP = (str(Path(__file__).with_name("noop_server.py")),)
QUIET = ("--canary-seconds", "0", "--log-level", "warning")
"""Nothing runs but what is measured."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Small towers are not faster with more, and threads that spin would disturb what is measured."""
TITLES = {
    "trips": "round trips: milliseconds a call, over a bare gRPC server and through the service with a no-op tower",
    "cpu": "seconds of processors for each GB that went up and down",
    "beside": "small items, alone and beside large items (milliseconds)",
}
Row = dict[str, Any]


def main() -> None:
    options = _parser().parse_args()
    parameters = {"seconds": options.seconds, "turns": options.turns}
    report = Report("wire", options.out, parameters | {"server_flags": options.server_flags})
    with tempfile.TemporaryDirectory(prefix="vitwire-") as folder:
        bench = Bench(report, options, Path(folder))
        for processes in options.rpc_processes:
            bench.run(processes)
    report.end(TITLES)


class Bench:
    """Measures one number of RPC processes after the other on the same checkpoints."""

    def __init__(self, report: Report, options: argparse.Namespace, folder: Path) -> None:
        self._report = report
        self._options = options
        self._models = {"wide": towers.with_rows_of(4096, 3, folder / "wide")}
        if not options.quick:
            self._models["narrow"] = towers.with_rows_of(64, 0, folder / "narrow")

    def run(self, processes: int) -> None:
        """All sections with this many RPC processes."""
        shape = {"rpc_processes": processes}
        with self._serving(("--rpc-processes", str(processes))) as servers:
            if "trips" in self._options.parts:
                for name in ("narrow", "wide"):
                    for table, row in round_trips.measured(servers.get(name, servers["wide"]), name, self._options):
                        self._report.add(table, shape | row)
            if "beside" in self._options.parts:
                self._report.add("beside", shape | self._beside(servers["wide"]))

    @contextmanager
    def _serving(self, flags: Sequence[str]) -> Iterator[dict[str, ServerProcess]]:
        """A server for each checkpoint; those that do not serve cost no time."""
        words = (*QUIET, *flags, *self._options.server_flags.split())
        wrapper = ("env", *(f"{key}={value}" for key, value in ONE_THREAD.items()))
        with ExitStack() as stack:
            servers = {
                name: stack.enter_context(serving(model, *words, wait=False, program=NOOP, wrapper=wrapper))
                for name, model in self._models.items()
            }
            for server in servers.values():
                server.wait_for("ready: ")
            yield servers

    def _beside(self, server: ServerProcess) -> Row:
        """Small items, one in flight, alone and beside four large ones."""
        with ExitStack() as stack:
            small, bulk = (stack.enter_context(ClientProcess("client", target=server.target)) for _ in range(2))
            prepared([small], {"size": "64"})
            prepared([bulk], {"size": "1024", "pixels": "float16"})

            def measured() -> Measured:
                return loaded([small], 1, self._options.seconds, [server.process.pid], ramp=0.3)

            alone = measured()
            bulk.send(run={"in_flight": 4, "stop": time.monotonic() + self._options.seconds + 0.6})
            beside = measured()
            bulk.answer()
        return {
            "alone_p50_ms": alone.milliseconds(0.5),
            "alone_p99_ms": alone.milliseconds(0.99),
            "beside_p50_ms": beside.milliseconds(0.5),
            "beside_p99_ms": beside.milliseconds(0.99),
            "errors": alone.errors | beside.errors,
        }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("wire-bench", description=__doc__)
    parser.add_argument("--rpc-processes", nargs="+", type=int, default=[1, 2], help="RPC processes of the servers")
    parts = ["trips", "beside"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--server-flags", default="", help="more flags of vitwire-server serve, in one argument")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each path of a row, in all its turns")
    parser.add_argument("--turns", type=int, default=5, help="turns of each path of a row")
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it runs, measures nothing")
    parser.add_argument("--out", type=Path, help="write the JSON document here too, after each row")
    return parser


if __name__ == "__main__":
    main()
