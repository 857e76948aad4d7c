"""`vitwire bench`."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vitwire._transport.connections import CONNECTIONS
from vitwire.cli._bench import scrape, traces
from vitwire.cli._bench.capacity import Verdict
from vitwire.cli._bench.finding import Finding, Goal, find_capacity
from vitwire.cli._bench.load import Load, Pace
from vitwire.cli._bench.options import (
    CLOSED_CONCURRENCY,
    ArrivalsOption,
    Concurrency,
    MetricsPages,
    Options,
    Rate,
    SentAs,
    Sizes,
    TraceFile,
    sizes_of,
)
from vitwire.cli._bench.pictures import check_prepared
from vitwire.cli._bench.report import check_plot, plot, plot_trials, shapes_table, table, trials_table
from vitwire.cli._bench.runs import Run, Runner, closed_pace
from vitwire.cli._bench.workload import Shape, of_sizes, of_trace
from vitwire.cli._connection import (
    DEFAULT_TARGET,
    INTERRUPTED,
    Ca,
    Cert,
    Connection,
    Key,
    Target,
    Timeout,
    Tls,
    Token,
    Wait,
    fail,
    reported,
    warn,
)


def bench(
    size: Sizes = None,
    items: Annotated[int, typer.Option(min=1, help="Images or clips per request.")] = 1,
    frames: Annotated[int, typer.Option(min=0, help="Send clips with this many frames instead of images.")] = 0,
    form: SentAs = "pixels",
    trace: TraceFile = None,
    concurrency: Concurrency = None,
    connections: Annotated[
        int, typer.Option(min=1, help="Maximum connections; a server with several RPC processes needs several.")
    ] = CONNECTIONS,
    rate: Rate = None,
    arrivals: ArrivalsOption = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Duration in seconds; with --find-capacity, the least for each trial.")
    ] = 10.0,
    requests: Annotated[int | None, typer.Option(min=1, help="Stop after this many requests.")] = None,
    metrics: MetricsPages = None,
    p99_ms: Annotated[
        float, typer.Option("--p99-ms", min=0.1, help="Latency that 99 % of requests must keep, for --find-capacity.")
    ] = 500.0,
    for_rate: Annotated[
        float | None, typer.Option(min=0.001, help="With --find-capacity: print the replicas for this many requests/s.")
    ] = None,
    headroom: Annotated[
        float, typer.Option(min=0.0, max=0.95, help="Share of the capacity that --for-rate leaves unused.")
    ] = 0.3,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Write a plot of the latencies to this file; PNG, SVG, … by suffix.")
    ] = None,
    *,
    search: Annotated[
        bool,
        typer.Option("--find-capacity", help="Search the highest rate at which 99 % of requests keep --p99-ms."),
    ] = False,
    repeat: Annotated[
        bool, typer.Option("--repeat", help="Send the same pixels each time, to measure the cache.")
    ] = False,
    target: Target = DEFAULT_TARGET,
    token: Token = None,
    tls: Tls = False,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    timeout: Timeout = 60.0,
    wait: Wait = False,
) -> None:
    """Benchmark the service with random images; the last line of output is one JSON document.

    Latency counts from when a request was due, so that waiting for earlier ones is part of it. Ctrl-C stops early,
    shows the results so far and exits with 130.
    """
    if search and requests is not None:
        raise typer.BadParameter("--find-capacity chooses the number of requests", param_hint="--requests")
    if for_rate is not None and not search:
        raise typer.BadParameter("needs --find-capacity", param_hint="--for-rate")
    if form == "jpeg" and frames:
        raise typer.BadParameter("a clip cannot be a JPEG: leave out --frames", param_hint="--as")
    if form != "pixels" and trace is not None:
        raise typer.BadParameter("a trace holds grids, so that only pixels can be sent", param_hint="--as")
    with reported():
        recorded = None if trace is None else traces.read(trace)
        pages = [scrape.page_url(text) for text in metrics or ()]
    options = Options(sizes_of(size), concurrency, rate, arrivals, recorded, seconds, requests)
    pace = options.pace()
    # Retries would hide what an overloaded server refuses.
    connection = Connection(target, token, tls, ca, cert, key, timeout, wait, max_retries=0, connections=connections)
    with connection.client() as client:
        if plot_file:
            check_plot(plot_file)
        model = connection.model(client)
        if recorded is None:
            check_prepared(model, frames)
            work = of_sizes(options.sizes, items, frames, form, model, lambda item: client.encode([item])[0].grid)
        else:
            work = of_trace(recorded, model)
        runner = Runner(client, pages)

        def run_at(pace: Pace) -> Run:
            return runner.run(Load(client, work, pace, fresh=not repeat))

        shapes = Load(client, work, pace).warm_up(model)
        _warn_of_resized(shapes)
        goal = Goal(p99_ms, seconds, for_rate, headroom)
        result = _found(goal, options, run_at) if search else run_at(pace)
    parameters = {
        "target": target,
        "model": model.model_id,
        "sizes": [] if recorded else list(map(str, options.sizes)),
        "shapes": list(map(asdict, shapes)),
        "trace": None if trace is None else str(trace),
        "items_per_request": None if recorded else items,
        "frames": frames,
        "as": form,
        "concurrency": pace.concurrency,
        "connections": connections,
        "arrivals": options.chosen_arrivals,
        "rate": rate,
    }
    _show(result, shapes, parameters | result.document(), plot_file)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)
    _check(result)


def _found(goal: Goal, options: Options, run_at: Callable[[Pace], Run]) -> Finding:
    """Start from half of what the service answers back to back, unless a rate is given."""
    first = options.rate
    if first is None:
        closed = run_at(closed_pace(min(5.0, options.seconds), options.concurrency or CLOSED_CONCURRENCY))
        if closed.interrupted or not closed.summary.answered:
            return Finding(goal, interrupted=closed.interrupted)
        first = max(0.02, 0.5 * len(closed.summary.answered) / closed.summary.seconds)

    def trial(rate: float, seconds: float, concurrency: int) -> Run:
        return run_at(options.pace_at(rate, seconds, concurrency))

    return find_capacity(goal, first, trial, _progress)


def _progress(trial: Verdict) -> None:
    verdict = "holds" if trial.holds else f"fails: {trial.limited_by}"
    latency = "unknown" if trial.p99_ms is None else f"{trial.p99_ms:.0f} ms"
    warn(f"{trial.rate:g} requests/s for {trial.seconds:g} s: p99 {latency}, {trial.missed} missed; {verdict}")


def _warn_of_resized(shapes: Sequence[Shape]) -> None:
    for shape in shapes:
        if shape.resized_to:
            warn(f"--size {shape.size}: the model takes it at {shape.resized_to}, {shape.tokens} tokens")


def _show(result: Run | Finding, shapes: Sequence[Shape], document: dict[str, object], plot_file: Path | None) -> None:
    console = Console()
    if shapes:
        console.print(shapes_table(shapes))
    if isinstance(result, Finding) and result.trials:
        console.print(trials_table(result.trials))
    console.print(table(document))
    typer.echo(json.dumps(document))
    if plot_file:
        with reported():
            if isinstance(result, Finding):
                plot_trials(plot_file, result.trials, result.goal.p99_ms, result.rate)
            else:
                plot(plot_file, result.summary)


def _check(result: Run | Finding) -> None:
    """Warns of figures that do not describe the server; exits with 1 if there is no result."""
    if isinstance(result, Finding):
        if result.rate is None:
            fail(f"no rate keeps {result.goal.p99_ms:g} ms for 99 % of requests; see the trials")
        if result.limited_by == "generator":
            warn("the generator could not send faster: the service may hold more; use more machines or processes")
        return
    if not result.summary.samples:
        fail("no request was due: use more --seconds, or a higher --rate")
    if not result.summary.answered:
        fail(f"all {len(result.summary.samples)} requests failed")
    if not result.summary.kept_pace():
        warn("the generator did not keep the rate: latencies include its own delays; use a faster or idle machine")
    elif result.limited_by() == "concurrency":
        warn(f"{result.concurrency} requests were in flight at once, and others waited: raise --concurrency")
