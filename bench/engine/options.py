"""The command line of `make engine-bench`, and what contradicts each other in it."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.engine.checkpoint import LANGUAGES
from bench.engine.loads import Load, Size

ROUTES = ("local", "inline", "reference", "again", "text")
LOCAL = {"local", "again", "text"}
"""Routes that need no server."""


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
    faults = [f"--routes: {name!r} is none of {', '.join(ROUTES)}" for name in options.routes if name not in ROUTES]
    numbers = ("requests", "text", "tokens", "devices")
    faults += [f"--{name} must be at least 1" for name in numbers if getattr(options, name) < 1]
    if options.source == "jpeg" and "text" in options.routes:
        faults.append("--from jpeg has no route of text")
    if not all(size.is_kept for size in options.sizes):
        faults.append("--sizes: a side must be a multiple of 32 from 128 on, which no processor changes")
    return faults


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("engine-bench", description=description)
    add = parser.add_argument
    add("--model", type=Path, default=Path("/tmp/engine-bench"), help="checkpoint; written if it is not there")
    add("--sizes", type=_list(Size.of), default="448x1,1024x1", help="SIDExIMAGES of a request, ...")
    add("--loads", type=_list(Load.of), default="c1,c8", help="cN: N in flight; pN: N requests/s, Poisson; ...")
    routes = f"of {', '.join(ROUTES)}; local alone needs no server"
    add("--routes", type=_list(str), default="local,reference,again", help=routes)
    add("--requests", type=int, default=96, help="of each stream")
    add("--text", type=int, default=64, help="tokens of text in a prompt")
    add("--tokens", type=int, default=16, help="tokens to generate")
    add("--itl", action="store_true", help="times between tokens of generations beside the last load, too")
    jpeg = "patches: made before TTFT begins; jpeg: files by HTTP, to vLLM or to vitwire router"
    add("--from", dest="source", choices=("patches", "jpeg"), default="patches", help=jpeg)
    add("--devices", type=int, default=2, help="the engine is on the first of them, the server on the last")
    add("--language", choices=LANGUAGES, default="2b", help="the language model")
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
