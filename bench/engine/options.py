"""The command line of `make engine-bench`, and what contradicts each other in it."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.engine.checkpoint import LANGUAGES
from bench.engine.loads import Load, Size
from bench.engine.splits import Split

WAYS = ("local", "inline", "reference", "again", "text")
LOCAL = {"local", "again", "text"}
"""Ways that need no server."""
SOURCES = ("patches", "jpeg")


def options_of(description: str | None, words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a command line, by default of this process's. Exits if they are wrong."""
    parser = _parser(description)
    options = parser.parse_args(words)
    options.sizes = list(dict.fromkeys(options.sizes))
    for fault in _faults(options):
        parser.error(fault)
    if options.quick:
        options.sizes, options.loads, options.requests = options.sizes[:1], options.loads[:2], min(options.requests, 16)
    return options


def _faults(options: argparse.Namespace) -> list[str]:
    faults = [f"--ways: {name!r} is none of {', '.join(WAYS)}" for name in options.ways if name not in WAYS]
    numbers = ("requests", "text", "tokens", "devices", "engines")
    faults += [f"--{name} must be at least 1" for name in numbers if getattr(options, name) < 1]
    if options.engines > options.devices and not options.tiny:
        faults.append(f"--engines {options.engines} need as many --devices, not {options.devices}")
    faults += [f"--from: {name!r} is none of {', '.join(SOURCES)}" for name in options.sources if name not in SOURCES]
    if "jpeg" in options.sources and "text" in options.ways:
        faults.append("--from jpeg has no way of text")
    faults += _setup_faults(options)
    if not all(size.is_kept for size in options.sizes):
        faults.append("--sizes: a side must be a multiple of 32 from 128 on, which no processor changes")
    return faults


def _setup_faults(options: argparse.Namespace) -> list[str]:
    faults = [
        f"--language: {name!r} is none of {', '.join(LANGUAGES)}" for name in options.language if name not in LANGUAGES
    ]
    if options.setups and options.engines > 1:
        faults.append("--setups list engines and encoders: leave out --engines")
    if len({load.closed for load in options.loads}) > 1 and options.setups:
        faults.append("--setups compare loads in their order: let all of --loads be cN, or all pN")
    faults += [
        f"--{name}: only --setups measure several"
        for name, values in (("language", options.language), ("from", options.sources))
        if not options.setups and len(values) > 1
    ]
    return faults


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("engine-bench", description=description)
    add = parser.add_argument
    add("--model", type=Path, default=Path("/tmp/engine-bench"), help="checkpoint; written if it is not there")
    add("--sizes", type=_list(Size.of), default="448x1,1024x1", help="SIDExIMAGES of a request, ...")
    add("--loads", type=_list(Load.of), default="c1,c8", help="cN: N in flight; pN: N requests/s, Poisson; ...")
    ways = f"of {', '.join(WAYS)}; local alone needs no server"
    add("--ways", type=_list(str), default="local,reference,again", help=ways)
    add("--requests", type=int, default=96, help="of each stream; with --setups at least 4 for each in flight")
    add("--text", type=int, default=64, help="tokens of text in a prompt")
    add("--tokens", type=int, default=16, help="tokens to generate")
    add("--itl", action="store_true", help="times between tokens of generations beside the last load, too")
    jpeg = "patches: made before TTFT begins; jpeg: files by HTTP, to vLLM or to vitwire router; --setups take both"
    add("--from", dest="sources", type=_list(str), default="patches", help=jpeg)
    add("--devices", type=int, default=2, help="the server is on the last of them, the engines are on the first ones")
    add("--engines", type=int, default=1, help="engines, each on a device; their front ends share this process")
    setups = "ENGINES+ENCODERS, ...: engines on the first devices, encoders on the next ones, under each of --loads"
    add("--setups", type=_list(Split.of), default=[], help=setups)
    add("--language", type=_list(str), default="2b", help=f"language models: {', '.join(LANGUAGES)}")
    add("--delivery", choices=("auto", "nixl", "stream"), default="auto", help="from the server into the engine")
    add("--engine-args", type=_object, default="{}", help="more arguments of vLLM, as JSON")
    flags = "--nixl --cache-bytes 8000000000 --rpc-processes 1"
    add("--server-flags", default=flags, help=f"flags of vitwire-server serve in one argument; default: {flags}")
    add("--server-pythonpath", default="", help="PYTHONPATH of the server, if it cannot share vLLM's")
    add("--tiny", action="store_true", help="a small model, and a server on the CPU")
    add("--quick", action="store_true", help="one size, two loads, 16 requests")
    add("--time-limit", type=float, default=540, help="seconds for everything; then print what was measured")
    add("--reserve", type=float, default=20, help="start no stream if fewer seconds are left")
    add("--out", type=Path, help="write the JSON document here too, after each row")
    return parser


def _list(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Type of an option with values between commas."""

    def values(text: str) -> list[Any]:
        try:
            return [kind(each) for each in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return values


def _object(text: str) -> dict[str, Any]:
    """Type of an option with a JSON object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return found
