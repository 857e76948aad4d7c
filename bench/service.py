"""`make service-bench`: server processes under the load of client processes, to find the bottleneck of the service.

A published tower with random weights is served by one process per entry of `--devices` (the same device may be
named more than once), and loaded with images of one size by `vitwire bench`, in one or several processes.
The last line of stdout is one JSON document.
"""

import argparse
import json
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from os import cpu_count, kill
from pathlib import Path
from typing import Any

import grpc
import torch
import transformers
from bench.models import PUBLISHED, shrunk, write
from rich.console import Console
from rich.table import Table

from servers import ServerProcess, supervising

CLIENT = (sys.executable, "-c", "from vitwire.cli import main; main()", "bench")
READY_SECONDS = 300
TINY = (2, 128)
"""Layers and columns of the model for `--tiny`."""
LEAD = 4.0
"""Seconds for clients to start before the measurement, and to run on after it."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Load:
    """Side of the images, one per request, and the number of requests in flight."""

    side: int
    in_flight: int


def main() -> None:
    options = _parser().parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="vitwire-") as folder:
        model_type, fields = PUBLISHED[options.tower]
        write(model_type, shrunk(fields, *TINY) if options.tiny else fields, Path(folder))
        for devices in options.devices:
            with supervising(Path(folder), devices, *options.flags.split()) as (supervisor, children):
                rows += [
                    _measured(devices, children, load, clients, options.seconds)
                    for load in options.loads
                    for clients in options.clients
                ]
                if options.kill and len(children) > 1:
                    rows.append(_killed(devices, supervisor, children, options))
    _show(rows)
    document = {"bench": "service", **_parameters(options), "rows": rows}
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


def _measured(devices: str, children: Mapping[str, ServerProcess], load: Load, clients: int, seconds: float) -> Row:
    """Figures of one load once it is under way; latencies are the median client's, and the worst one's at 99 %."""
    with _clients(children, load, clients, LEAD + seconds + LEAD) as running:
        time.sleep(LEAD)
        began, before = time.perf_counter(), _counted(children)
        time.sleep(seconds)
        spent, after = time.perf_counter() - began, _counted(children)
        documents = [json.loads(client.communicate()[0].splitlines()[-1]) for client in running]
    items, tokens, busy = ((now - then) / spent for now, then in zip(after, before, strict=True))
    latencies = [each["latency_ms"] for each in documents]
    return {
        "devices": devices,
        "side": load.side,
        "in_flight": load.in_flight,
        "clients": clients,
        "images_per_second": round(items, 1),
        "tokens_per_second": round(tokens),
        "p50_ms": sorted(each.get("p50", 0.0) for each in latencies)[clients // 2],
        "p99_ms": max(each.get("p99", 0.0) for each in latencies),
        "busy": round(busy / len(children), 3),
        "errors": _errors(documents),
    }


def _killed(
    devices: str, supervisor: ServerProcess, children: Mapping[str, ServerProcess], options: argparse.Namespace
) -> Row:
    """One process is killed under load: the clients' errors, and the time until its successor was ready."""
    load, clients, pid = options.loads[0], options.clients[-1], supervisor.process.pid
    first = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    with _clients(children, load, clients, LEAD + options.seconds) as running:
        time.sleep(LEAD)
        kill(first, signal.SIGKILL)
        died = time.perf_counter()
        label = supervisor.wait_for(r"(\S+) exited unexpectedly \(SIGKILL\)")[1]
        supervisor.wait_for(rf"(?s)(\[{label}\] ready: .*){{2}}", READY_SECONDS)
        back = time.perf_counter() - died
        documents = [json.loads(client.communicate()[0].splitlines()[-1]) for client in running]
    return {
        "devices": devices,
        "side": load.side,
        "in_flight": load.in_flight,
        "clients": clients,
        "killed": label,
        "requests": sum(each["requests"] for each in documents),
        "errors": _errors(documents),
        "ready_again_seconds": round(back, 1),
    }


@contextmanager
def _clients(
    children: Mapping[str, ServerProcess], load: Load, clients: int, seconds: float
) -> Iterator[Sequence[subprocess.Popen[str]]]:
    """Client processes that share the load, stopped at the end of the block, by force if necessary."""
    target = "ipv4:" + ",".join(child.target for child in children.values())
    words = ("--target", target, "--size", f"{load.side}x{load.side}", "--seconds", str(seconds))
    own = ("--concurrency", str(max(1, load.in_flight // clients)))
    running = [subprocess.Popen((*CLIENT, *words, *own), stdout=subprocess.PIPE, text=True) for _ in range(clients)]
    try:
        yield running
    finally:
        for client in running:
            client.kill()
            client.wait()


def _counted(children: Mapping[str, ServerProcess]) -> tuple[float, float, float]:
    """Items, tokens and seconds of computation of all processes since their start."""
    items = sum(child.metric("vitwire_items_total") for child in children.values())
    tokens = sum(child.metric("vitwire_tokens_total", kind="real") for child in children.values())
    computed = sum(child.metric("vitwire_stage_seconds_sum", stage="execute") for child in children.values())
    return items, tokens, computed


def _errors(documents: Sequence[Row]) -> dict[str, int]:
    return dict(sum((Counter(each["errors"]) for each in documents), Counter()))


def _pair(text: str) -> Load:
    side, _, in_flight = text.partition(":")
    return Load(int(side), int(in_flight))


def _show(rows: Sequence[Row]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*columns)
    for row in rows:
        table.add_row(*(str(row.get(name, "")) for name in columns))
    Console(width=160).print(table)


def _parameters(options: argparse.Namespace) -> Row:
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.processor()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "tower": options.tower,
        "tiny": options.tiny,
        "seconds": options.seconds,
        "device": device,
        "cores": cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "grpc": grpc.__version__,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("service-bench", description=__doc__)
    parser.add_argument("--devices", nargs="+", default=["cuda:0"], help="setups, each with a process per device named")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4], help="client processes")
    loads = [Load(224, 64), Load(448, 32), Load(1024, 16)]
    parser.add_argument("--loads", nargs="+", type=_pair, default=loads, help="SIDE:REQUESTS in flight, such as 224:64")
    parser.add_argument("--seconds", type=float, default=6.0, help="how long each load lasts")
    parser.add_argument("--tower", choices=PUBLISHED, default="Qwen3-VL-8B")
    parser.add_argument("--tiny", action="store_true", help="a tower of the same shape, but small")
    parser.add_argument("--flags", default="", help="of vitwire-server serve, in one argument")
    parser.add_argument("--kill", action="store_true", help="kill one process of each setup of several, under load")
    parser.add_argument("--out", type=Path, help="write the JSON document here too")
    return parser


if __name__ == "__main__":
    main()
