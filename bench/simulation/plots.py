"""Plots of the study of a simulated fleet."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from bench.simulation.routing import POLICIES
from bench.simulation.scaling import SCENARIOS, doubled
from matplotlib.figure import Figure

mpl.rcParams["svg.hashsalt"] = "vitwire"
_DATELESS = {"Date": None}


def plot_routing(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Latency and hits by load, for each policy, with the spread over the seeds."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    latency, hits = figure.subplots(1, 2)
    for cache in (False, True):
        for number, policy in enumerate(POLICIES):
            chosen = [row for row in rows if (row["policy"], row["cache"]) == (policy, cache)]
            if not chosen:
                continue
            label = policy.replace("_", " ") + ("" if cache else ", no cache")
            _line(latency, chosen, "p99_ms", f"C{number}{'-' if cache else '--'}", label)
            if cache:
                _line(hits, chosen, "hits", f"C{number}-", label)
    latency.set(xlabel="load, share of the capacity without cache", ylabel="p99, ms", yscale="log")
    hits.set(
        xlabel="load, share of the capacity without cache", ylabel="share of images from the cache", ylim=(0, None)
    )
    latency.legend(fontsize=7)
    hits.legend(fontsize=7)
    figure.savefig(path, metadata=_DATELESS)


def _line(axes: Any, rows: Sequence[dict[str, Any]], name: str, style: str, label: str) -> None:
    """Each policy has one color in both plots."""
    values = np.array([row[name] for row in rows])
    ranges = np.array([row["spread"].get(name, [row[name]] * 2) for row in rows])
    errors = np.abs(ranges - values[:, None]).T
    axes.errorbar([row["load"] for row in rows], values, errors, fmt=style, marker="o", capsize=2, label=label)


def plot_scaling(tokens: Sequence[int], options: argparse.Namespace, path: Path) -> None:
    """The p99 of each second around the moment at which the load doubles."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    for scenario in SCENARIOS:
        aim, cache_bytes = options.aim_ms / 1e3, options.cache_gib * 2**30
        _, fleet = doubled(tokens, scenario, options.scaling_replicas, cache_bytes, aim, seed=0)
        due, latencies = np.array(fleet.tally.due), np.array(fleet.tally.latencies)
        seconds = (due - fleet.tally.start - 10).astype(int)
        found = [np.percentile(latencies[seconds == each], 99, method="higher") for each in np.unique(seconds)]
        axes.plot(np.unique(seconds), np.minimum(found, 10), label=scenario.name, linewidth=1)
    axes.axhline(options.aim_ms / 1e3, color="#888888", linewidth=0.8, linestyle="--")
    axes.set(xlabel="seconds since the load doubled", ylabel="p99 of each second, s (10: requests fail)", yscale="log")
    axes.legend(fontsize=7)
    figure.savefig(path, metadata=_DATELESS)
