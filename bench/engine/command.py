"""`make engine-bench`: vLLM with a language model, with its tower and with a Vitwire server, measured in one run.

vLLM serves a random Qwen3-VL of published size, and a Vitwire server its tower on another device or the same. The same
requests go each way: `local` (the engine's tower), `inline` (embeddings in the request) and `reference` (the engine
fetches what the server stored); `again` is local once more, the control for the tokens.
Pictures are decoded and split into patches beforehand. The last line of stdout is one JSON document.
"""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

from bench.engine import checkpoint, loads, vllm_engine
from bench.engine.answers import Answer, between_tokens, compared, figures, timeline
from bench.engine.limits import Clock, OutOfTime, limited
from bench.engine.loads import Load, Size
from bench.engine.plots import plot
from bench.engine.requests import Asked, draw
from bench.engine.running import running
from bench.engine.ways import Inline, Local, Reference, Text, Way
from bench.report import Report

from servers import PYTHON, ServerProcess, serving
from vitwire import AsyncClient

TITLES = {
    "streams": "streams of requests",
    "timeline": "milliseconds since the start of a request, medians; the server's stages are lengths",
    "itl": "times between the tokens of four generations that run beside each way",
    "against_local": "beside the engine's own tower: ratios, and tokens that are equal",
}
WAYS = ("local", "inline", "reference", "again")
READY_SECONDS = 300


def main() -> None:
    """Exits with 1 if the run ended early; what was measured until then is printed."""
    options = _parser().parse_args()
    if options.quick:
        options.sizes, options.loads, options.requests = options.sizes[:1], options.loads[:2], min(options.requests, 16)
    os.environ.update({name: value for name, value in vllm_engine.ENVIRONMENT.items() if name not in os.environ})
    named = ("requests", "text", "tokens", "devices", "engines", "delivery")
    report = Report("engine", options.out, {name: getattr(options, name) for name in named})
    clock = Clock(options.time_limit)
    with limited(clock, lambda: report.end(TITLES)):
        try:
            Bench(report, options, clock).run()
        except (OutOfTime, Exception) as error:  # noqa: BLE001 - what was measured is worth more
            traceback.print_exception(error)
            report.note("error", repr(_cause(error)))
    if options.plot and "device" in report.document():
        try:
            plot(report.document(), options.plot)
        except ImportError as error:
            report.skip("plot", f"{error.name} is not installed")
    report.end(TITLES)
    sys.exit(int("error" in report.document()))


class Bench:
    """Starts an engine and a server, and sends streams of requests until the time is over."""

    def __init__(self, report: Report, options: argparse.Namespace, clock: Clock) -> None:
        self._report = report
        self._options = options
        self._clock = clock
        self._names = (f"request-{number}" for number in count())

    def run(self) -> None:
        if not self._options.model.exists():
            words = [PYTHON, "-m", checkpoint.__name__, str(self._options.model)]
            words += ["--tiny"] if self._options.tiny else ["--device", "cuda"]
            subprocess.run([*_environment(self._options), *words], check=True, stdout=sys.stderr)
        if set(self._options.ways) <= {"local", "again"}:
            asyncio.run(self._measure("", None))
            return
        with _server(self._options) as (target, starting):
            asyncio.run(self._measure(target, starting))

    async def _measure(self, target: str, starting: "Future[ServerProcess] | None") -> None:
        options = self._options
        async with AsyncExitStack() as stack:
            engines = []
            for index in range(options.engines):
                engines.append(self._engine(target, index if options.engines > 1 else None))
                stack.callback(engines[-1].shutdown)
            client = None
            if starting:
                server = await asyncio.wrap_future(starting)
                await asyncio.to_thread(server.wait_for, "ready: ", max(1.0, min(READY_SECONDS, self._clock.left)))
                client = await stack.enter_async_context(AsyncClient(target))
            for size in options.sizes:
                asked = await draw(size, options.requests, options.text, client)
                ways = {name: _ways(name, engines, client) for name in options.ways}
                await self._size(size, asked, ways)
                if options.itl:
                    await self._beside(size, asked, ways)
                self._report.note("connector", vllm_engine.connector_counts())

    def _engine(self, target: str, device: int | None) -> Any:
        options, began = self._options, time.monotonic()
        images = max(4, *(size.images for size in options.sizes))
        graphs = "inline" not in options.ways
        chosen = vllm_engine.arguments(options.model, target, images=images, graphs=graphs, delivery=options.delivery)
        self._report.note("encoder_graphs", graphs)
        engine = vllm_engine.start(chosen | json.loads(options.engine_args), device)
        for name, value in vllm_engine.described().items():
            self._report.note(name, value)
        self._report.note("engine_start_s", round(time.monotonic() - began, 1))
        return engine

    async def _size(self, size: Size, asked: Sequence[Asked], ways: dict[str, list[Way]]) -> None:
        for each in ways.values():  # kernels, allocators and connections
            await self._stream(each, asked[:8], Load(closed=True, amount=4))
        for load in self._options.loads:
            rows: dict[str, Any] = {}
            local: list[Answer] = []
            for name, each in ways.items():
                place = {"size": str(size), "load": str(load), "way": name}
                if not self._has_time("stream", place):
                    continue
                answers = await self._stream(each, asked, load)
                rows[name] = self._report.add("streams", place | figures(answers, load))
                self._report.add("timeline", place | timeline(answers))
                for error in {answer.error for answer in answers if answer.error}:
                    self._report.skip(" ".join(place.values()), error)
                local = local or (answers if name == "local" else [])
                if name != "local" and local:
                    ratios = {
                        f"{column}_ratio": _ratio(rows, name, column) for column in ("ttft_p50_ms", "requests_per_s")
                    }
                    self._report.add("against_local", place | ratios | compared(answers, local))

    async def _beside(self, size: Size, asked: Sequence[Asked], ways: dict[str, list[Way]]) -> None:
        """Times between the tokens of generations that run alone, beside prompts of text, and beside each way."""
        texts = [Text(way.front) for way in next(iter(ways.values()))]
        load = self._options.loads[-1]
        for name, each in ({"alone": [], "text": texts} | ways).items():
            place = {"size": str(size), "load": str(load), "way": name}
            if self._has_time("itl", place):
                async with running(texts, asked, self._names) as answers:
                    await (self._stream(each, asked, load) if each else asyncio.sleep(1))
                self._report.add("itl", place | between_tokens(answers))

    def _has_time(self, what: str, place: dict[str, str]) -> bool:
        if self._clock.left >= self._options.reserve:
            return True
        self._report.skip(f"{what} {' '.join(place.values())}", "no time")
        return False

    async def _stream(self, ways: Sequence[Way], asked: Sequence[Asked], load: Load) -> list[Answer]:
        """One stream over all engines in turn; what precedes the requests is done before it starts."""
        names = list(islice(self._names, len(asked)))
        turns = [ways[number % len(ways)] for number in range(len(asked))]
        prepared = zip(turns, asked, names, strict=True)
        ready = await asyncio.gather(*(way.prepare(each, name) for way, each, name in prepared))

        async def call(number: int) -> Answer:
            one, ready[number] = ready[number], None
            way, name = turns[number], names[number]
            return await vllm_engine.answered(way, asked[number], one, name, self._options.tokens)

        return await loads.drive(load, len(asked), call)


def _ways(name: str, engines: Sequence[Any], client: AsyncClient | None) -> list[Way]:
    """The way of this name into each engine."""
    if name in ("local", "again"):
        return [Local(engine) for engine in engines]
    assert client, "started for the other ways"
    return [(Inline if name == "inline" else Reference)(engine, client) for engine in engines]


def _ratio(rows: dict[str, Any], name: str, column: str) -> float | None:
    ours, local = rows[name].get(column), rows.get("local", {}).get(column)
    return round(ours / local, 3) if ours and local else None


@contextmanager
def _server(options: argparse.Namespace) -> "Iterator[tuple[str, Future[ServerProcess]]]":
    """Address of a server that starts in the background, so that an engine can start at the same time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    device = "cpu" if options.tiny else f"cuda:{options.devices - 1}"
    flags = ["--device", device, "--port", str(port), *options.server_flags.split()]
    with ExitStack() as stack, ThreadPoolExecutor(1) as starter:
        starting = serving(options.model, *flags, wait=False, wrapper=_environment(options))
        yield f"127.0.0.1:{port}", starter.submit(stack.enter_context, starting)


def _cause(error: BaseException) -> BaseException:
    """What an error of several tasks, or of vLLM, comes from."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error.__cause__ or error


def _environment(options: argparse.Namespace) -> list[str]:
    """Prefix of commands that run what the server runs."""
    path = options.server_pythonpath or f"client:server:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    return ["env", f"PYTHONPATH={path}"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("engine-bench", description=__doc__)
    add = parser.add_argument
    add("--model", type=Path, default=Path("/tmp/engine-bench"), help="checkpoint; written if it is not there")
    add("--sizes", type=_list(Size.of), default="448x1,1024x1", help="SIDExIMAGES of a request, ...")
    add("--loads", type=_list(Load.of), default="c1,c8", help="cN: N in flight; pN: N requests/s, Poisson; ...")
    add(
        "--ways",
        type=_list(str),
        default="local,reference,again",
        help=f"of {', '.join(WAYS)}; local alone needs no server",
    )
    add("--requests", type=int, default=96, help="of each stream")
    add("--text", type=int, default=64, help="tokens of text in a prompt")
    add("--tokens", type=int, default=16, help="tokens to generate")
    add("--itl", action="store_true", help="times between tokens of generations beside the last load, too")
    add("--devices", type=int, default=2, help="the server is on the last of them, the engines are on the first ones")
    add("--engines", type=int, default=1, help="engines, each on a device; their front ends share this process")
    add("--delivery", default="auto", help="auto, nixl or stream, from the server into the engine")
    add("--engine-args", default="{}", help="more arguments of vLLM, as JSON")
    flags = "--nixl --cache-bytes 8000000000 --rpc-processes 1"
    add("--server-flags", default=flags, help=f"flags of vitwire-server serve in one argument; default: {flags}")
    add("--server-pythonpath", default="", help="PYTHONPATH of the server, if it cannot share vLLM's")
    add("--tiny", action="store_true", help="a small model, and a server on the CPU")
    add("--quick", action="store_true", help="one size, two loads, 16 requests")
    add("--time-limit", type=float, default=540, help="seconds for everything; then print what was measured")
    add("--reserve", type=float, default=20, help="start no stream if fewer seconds are left")
    add("--out", type=Path, help="write the JSON document here too, after each row")
    add("--plot", type=Path, help="write plots here (PNG)")
    return parser


def _list(kind: Any) -> Any:
    """Type of an option with values between commas."""
    return lambda text: [kind(each) for each in text.split(",")]
