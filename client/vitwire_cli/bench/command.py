"""`vitwire bench`."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import typer
from rich.console import Console

from vitwire import Client, Model
from vitwire_cli.bench import report
from vitwire_cli.bench.capacity import Finding, Verdict, find_capacity
from vitwire_cli.bench.load import Load, Pace
from vitwire_cli.bench.options import CLOSED_CONCURRENCY, Options
from vitwire_cli.bench.results import Run, run
from vitwire_cli.bench.workload import Shape, Workload, of_sizes, random_item
from vitwire_cli.connection import INTERRUPTED, PatientConnection, fail, reported, warn
from vitwire_flags.options import with_options

_OPTIONS = Options()
_CONNECTION = PatientConnection(timeout=60.0, max_retries=0)
"""Retries would hide what an overloaded server refuses."""


@with_options
def bench(*, options: Options = _OPTIONS, connection: PatientConnection = _CONNECTION) -> None:
    """Benchmark the service with random images or a clip; the last line of output is one JSON document.

    Latency counts from when a request was due, so that waiting for earlier ones is part of it. Ctrl-C stops early,
    shows the results so far and exits with 130.
    """
    with reported():
        sizes, pace = options.sizes, options.pace()
        clip = options.clip_item()
    with replace(connection, connections=options.connections).client() as client:
        if options.plot:
            report.check_plot(options.plot)
        model = connection.model(client)
        work = Workload([[clip] * options.items], {options.clip: clip}) if clip else _workload(options, client, model)

        def run_at(pace: Pace) -> Run:
            return run(Load(client, work, pace, fresh=not options.repeat))

        shapes = Load(client, work, pace).warm_up()
        result = _found(options, run_at) if options.search else run_at(pace)
    parameters = {
        "target": connection.target,
        "model": model.model_id,
        "sizes": list(map(str, sizes)),
        "shapes": list(map(asdict, shapes)),
        "items_per_request": options.items,
        "frames": None if clip else options.frames,
        "clip": str(options.clip) if options.clip else None,
        "as": "file" if options.clip else options.form,
        "concurrency": pace.concurrency,
        "connections": options.connections,
        "arrivals": options.chosen_arrivals,
        "rate": options.rate,
    }
    _show(result, shapes, parameters | result.document(), options)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)
    _check(result)


def _workload(options: Options, client: Client, model: Model) -> Workload:
    items = [
        random_item(
            (size.height, size.width), options.frames, options.form, model, lambda item: client.encode([item])[0].grid
        )
        for size in options.sizes
    ]
    return of_sizes(options.sizes, items, options.items)


def _found(options: Options, run_at: Callable[[Pace], Run]) -> Finding:
    """Start from half of what the service answers back to back, unless a rate is given."""
    first = options.rate
    if first is None:
        closed = run_at(Pace(options.concurrency or CLOSED_CONCURRENCY, min(5.0, options.seconds)))
        if closed.interrupted or not closed.answered:
            return Finding(options, interrupted=closed.interrupted)
        first = max(0.02, 0.5 * len(closed.answered) / closed.seconds)
    return find_capacity(options, first, run_at, _progress)


def _progress(trial: Verdict) -> None:
    verdict = "holds" if trial.holds else f"fails: {trial.limited_by}"
    latency = "unknown" if trial.p99_ms is None else f"{trial.p99_ms:.0f} ms"
    warn(f"{trial.rate:g} requests/s for {trial.seconds:g} s: p99 {latency}, {trial.missed} missed; {verdict}")


def _show(result: Run | Finding, shapes: Sequence[Shape], document: dict[str, object], options: Options) -> None:
    console = Console()
    if shapes:
        console.print(report.list_table(shapes))
    if isinstance(result, Finding) and result.trials:
        console.print(report.list_table(result.trials))
    console.print(report.table(document))
    typer.echo(json.dumps(document))
    measured = result.last if isinstance(result, Finding) else result
    if options.plot and measured:
        with reported():
            report.plot(options.plot, measured)


def _check(result: Run | Finding) -> None:
    """Warns of figures that do not describe the server; exits with 1 if there is no result."""
    if isinstance(result, Finding):
        if result.rate is None:
            fail(f"no rate keeps {result.options.p99_ms:g} ms for 99 % of requests; see the trials")
        if result.limited_by == "generator":
            warn("the generator could not send faster: the service may hold more; use more machines or processes")
        return
    if not result.samples:
        fail("no request was due: use more --seconds, or a higher --rate")
    if not result.answered:
        fail(f"all {len(result.samples)} requests failed")
    if not result.kept_pace():
        warn("the generator did not keep the rate: latencies include its own delays; use a faster or idle machine")
    elif result.limited_by() == "concurrency":
        warn(f"{result.concurrency} requests were in flight at once, and others waited: raise --concurrency")
