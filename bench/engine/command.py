"""`make engine-bench`: vLLM with a language model, with its tower and with a Vitwire server, measured in one run.

vLLM serves a random Qwen3-VL of published size, and a Vitwire server its tower on another device or the same. The same
requests take each route: `local` (the engine's tower), `inline` (embeddings in the request) and `reference` (the engine
fetches what the server stored); `again` is local once more, the control for the tokens, and `text` has as many tokens
of text, without images.
Pictures are decoded and split into patches beforehand, or with `--from jpeg` come as files over HTTP. The last line of
stdout is one JSON document.
"""

import argparse
import asyncio
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import count
from typing import TYPE_CHECKING, Any

from bench.engine import vllm_engine
from bench.engine.answers import Answer, between_tokens, compared, figures, timeline
from bench.engine.encoder import environment, starting, written
from bench.engine.front import Front
from bench.engine.limits import Clock, OutOfTime, limited
from bench.engine.loads import Load, Size
from bench.engine.options import LOCAL, options_of
from bench.engine.requests import Asked, draw
from bench.engine.routes import Inline, Local, Reference, Text
from bench.engine.sending import Sender
from bench.engine.streams import AnyRoute, running, stream
from bench.report import Report

from vitwire import AsyncClient

if TYPE_CHECKING:
    from concurrent.futures import Future

    from servers import ServerProcess

TITLES = {
    "streams": "streams of requests",
    "timeline": "milliseconds since the start of a request, medians; the server's stages are lengths",
    "itl": "times between the tokens of four generations that run beside each route",
    "against_local": "beside the engine's own tower: ratios, and tokens that are equal",
}
READY_SECONDS = 300


def main() -> None:
    """Exits with 1 if the run ended early; what was measured until then is printed."""
    options = options_of(__doc__)
    os.environ.update({name: value for name, value in vllm_engine.ENVIRONMENT.items() if name not in os.environ})
    named = ("source", "requests", "text", "tokens", "devices", "delivery", "server_flags")
    report = Report("engine", options.out, {name: getattr(options, name) for name in named})
    clock = Clock(options.time_limit)
    with limited(clock, lambda: report.end(TITLES)):
        try:
            Bench(report, options, clock).run()
        except (OutOfTime, Exception) as error:  # noqa: BLE001 - what was measured is worth more
            traceback.print_exception(error)
            report.note("error", repr(_cause(error)))
    report.end(TITLES)
    sys.exit(int("error" in report.document()))


class Bench:
    """Starts an engine and a server, and sends streams of requests until the time is over."""

    def __init__(self, report: Report, options: argparse.Namespace, clock: Clock) -> None:
        self._report = report
        self._options = options
        self._clock = clock
        self._names = (f"request-{number}" for number in count())
        self._seeds = count()

    def run(self) -> None:
        self._options.model = written(self._options)
        if set(self._options.routes) <= LOCAL:
            asyncio.run(self._measure("", None))
            return
        device = "cpu" if self._options.tiny else f"cuda:{self._options.devices - 1}"
        flags = self._options.server_flags.split()
        with starting(self._options.model, device, flags, environment(self._options)) as (target, server):
            asyncio.run(self._measure(target, server))

    async def _measure(self, target: str, starting: "Future[ServerProcess] | None") -> None:
        options = self._options
        async with AsyncExitStack() as stack:
            engine = self._engine(target)
            stack.callback(engine.shutdown)
            client, sender = None, None
            if starting:
                server = await asyncio.wrap_future(starting)
                seconds = max(1.0, min(READY_SECONDS, self._clock.left))
                await asyncio.to_thread(server.wait_for, "ready: ", seconds)
                client = await stack.enter_async_context(AsyncClient(target))
                sender = await Sender.start(target)
                stack.callback(sender.close)
            front = None
            if options.source == "jpeg":
                modes = sorted(set(options.routes) - LOCAL)
                started = Front.of(engine, options.model, target, environment(options), modes)
                front = await stack.enter_async_context(started)
            routes = {
                name: front.route(name) if front else _route(name, engine, client, sender) for name in options.routes
            }
            for size in options.sizes:
                await self._size(size, client, routes)
                if options.itl:
                    await self._beside(size, await self._draw(size, client), routes, Text(engine))
                self._report.note("connector", vllm_engine.connector_counts())

    def _engine(self, target: str) -> Any:
        options, began = self._options, time.monotonic()
        images = max(4, *(size.images for size in options.sizes))
        graphs = "inline" not in options.routes
        chosen = vllm_engine.arguments(options.model, target, images=images, graphs=graphs, delivery=options.delivery)
        self._report.note("encoder_graphs", graphs)
        engine = vllm_engine.start(chosen | options.engine_args)
        for name, value in vllm_engine.described().items():
            self._report.note(name, value)
        self._report.note("engine_start_s", round(time.monotonic() - began, 1))
        return engine

    async def _draw(self, size: Size, client: AsyncClient | None, count: int = 0) -> list[Asked]:
        """Requests with pictures that no server has seen."""
        return await draw(size, count or self._options.requests, self._options.text, client, next(self._seeds))

    async def _size(self, size: Size, client: AsyncClient | None, routes: dict[str, AnyRoute]) -> None:
        asked = await self._draw(size, client, min(8, self._options.requests))
        for name, each in routes.items():  # kernels, allocators and connections
            answers = await self._stream(each, asked, Load(closed=True, amount=4))
            self._errors({"size": str(size), "load": "warm-up", "route": name}, answers)
        for load in self._options.loads:
            asked = await self._draw(size, client)
            rows: dict[str, Any] = {}
            local: list[Answer] = []
            for name, each in routes.items():
                place = {"size": str(size), "load": str(load), "route": name}
                if not self._has_time("stream", place):
                    continue
                answers = await self._stream(each, asked, load)
                rows[name] = self._report.add("streams", place | figures(answers, load))
                self._report.add("timeline", place | timeline(answers))
                self._errors(place, answers)
                local = local or (answers if name == "local" else [])
                if name != "local" and local:
                    ratios = {
                        f"{column}_ratio": _ratio(rows, name, column) for column in ("ttft_p50_ms", "requests_per_s")
                    }
                    self._report.add(
                        "against_local", place | ratios | (compared(answers, local) if name != "text" else {})
                    )

    async def _beside(self, size: Size, asked: Sequence[Asked], routes: dict[str, AnyRoute], text: Text) -> None:
        """Times between the tokens of generations that run alone, beside prompts of text, and beside each route."""
        load = self._options.loads[-1]
        rows: dict[str, Any] = {}
        for name, each in ({"alone": None, "text": text} | routes).items():
            place = {"size": str(size), "load": str(load), "route": name}
            if self._has_time("itl", place):
                async with running(text, asked, self._names) as answers:
                    await (self._stream(each, asked, load) if each else asyncio.sleep(1))
                rows[name] = between_tokens(answers)
                ratio = {"itl_p99_to_text": _ratio(rows, name, "itl_p99_ms", "text")} if name in routes else {}
                self._report.add("itl", place | rows[name] | ratio)

    def _errors(self, place: dict[str, str], answers: Sequence[Answer]) -> None:
        for error in {answer.error for answer in answers if answer.error}:
            self._report.skip(" ".join(place.values()), error)

    def _has_time(self, what: str, place: dict[str, str]) -> bool:
        if self._clock.left >= self._options.reserve:
            return True
        self._report.skip(f"{what} {' '.join(place.values())}", "no time")
        return False

    async def _stream(self, route: AnyRoute, asked: Sequence[Asked], load: Load) -> list[Answer]:
        return await stream(route, asked, self._names, load, self._options.tokens)


def _route(name: str, engine: Any, client: AsyncClient | None, sender: Sender | None) -> AnyRoute:
    """The route of this name into the engine."""
    if name in LOCAL:
        return Text(engine) if name == "text" else Local(engine)
    assert client, "started for the other routes"
    assert sender, "as above"
    return Inline(engine, client) if name == "inline" else Reference(engine, sender)


def _ratio(rows: dict[str, Any], name: str, column: str, other: str = "local") -> float | None:
    one, base = rows[name].get(column), rows.get(other, {}).get(column)
    return round(one / base, 3) if one and base else None


def _cause(error: BaseException) -> BaseException:
    """What an error of several tasks, or of vLLM, comes from."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error.__cause__ or error
