"""The command line of `make engine-bench`, and what contradicts each other in it."""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.engine.checkpoint import LANGUAGES
from bench.engine.loads import Load, Size
from bench.engine.photos import MIX
from bench.engine.serving import SERVE, Settings

SETUPS = ("local", "plugin", "beside", "again")
_ORDER = "local,plugin,again"
COMPARED = ("tokens", "text", "repeats", "language", "memory", "setup", "server_flags", "delivery", "mps", "tiny")
"""Options that must be equal in all runs of a document, as text or numbers."""
DEFAULT = Settings()


def options_of(description: str | None, words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a command line, by default of this process's. Exits if they are wrong."""
    parser = _parser(description)
    options = parser.parse_args(words)
    for fault in _faults(options):
        parser.error(fault)
    options.devices = int(options.setup.partition("@")[0])
    return options


def _faults(options: argparse.Namespace) -> list[str]:
    faults = [f"--order: {name!r} is none of {', '.join(SETUPS)}" for name in options.order if name not in SETUPS]
    numbers = ("requests", "text", "tokens", "clients", "probe_requests")
    faults += [f"--{name.replace('_', '-')} must be at least 1" for name in numbers if getattr(options, name) < 1]
    if not re.fullmatch(r"([1-9])@\1", options.setup):
        faults.append(f"--setup is N@N, N engines and N encoders on the same N devices; got {options.setup!r}")
    if options.out and not options.out.absolute().parent.is_dir():
        faults.append(f"--out: the folder {options.out.parent} does not exist")
    if not 0.1 <= options.memory <= 0.95:
        faults.append("--memory must be from 0.1 to 0.95")
    if not 0 <= options.mps <= 100:
        faults.append("--mps must be from 1 to 100")
    if not 0 <= options.repeats < 1:
        faults.append("--repeats must be at least 0 and less than 1")
    return faults


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("engine-bench", description=description)
    add = parser.add_argument
    add("--model", type=Path, default=Path("/tmp/engine-bench"), help="checkpoint; written if it is not there")
    add("--language", choices=LANGUAGES, default="2b", help="the language model")
    add("--sizes", type=_list(_size), default=MIX, help="SIDExIMAGES of a request, or mix, ...")
    add("--loads", type=_list(Load.of), default="p10,p15,p20", help="cN: N in flight; pN: N requests/s, Poisson; ...")
    add(
        "--order",
        type=_list(str),
        default=_ORDER,
        help="setups, one after the other on the device: " + ", ".join(SETUPS),
    )
    add("--setup", default="1@1", help="N@N: N engines, beside each of which an encoder shares its device")
    add("--requests", type=int, default=1000, help="of each stream")
    add("--text", type=int, default=64, help="tokens of text in a prompt")
    add("--tokens", type=int, default=128, help="tokens to generate")
    add("--repeats", type=float, default=0.0, help="share of requests that repeat the image of the one before")
    add("--memory", type=float, default=0.9, help="share of the device for engine, and encoder if there is one")
    add("--mps", type=int, default=0, nargs="?", const=100, help="beside: under MPS, the encoder with this percentage")
    add("--sweep", action="store_true", help="find the best settings of local for --local, and measure nothing else")
    add("--probe", type=Load.of, default="c32", help="load of the sweep")
    add("--probe-requests", type=int, default=320, help="requests of each probe")
    add("--local", type=_settings, default=DEFAULT, help="document with a sweep: its best settings for all setups")
    add("--beside", type=_settings, default=DEFAULT, help="JSON of more flags and environment for beside's engine")
    add("--delivery", choices=("auto", "nixl", "stream"), default="auto", help="from the server into the engine")
    flags = "--nixl --cache-bytes 8000000000 --rpc-processes 1"
    add("--server-flags", default=flags, help=f"flags of vitwire-server serve in one argument; default: {flags}")
    add("--server-pythonpath", default="", help="PYTHONPATH of server and router, if they cannot share vLLM's")
    add("--engine", default=SERVE, help="command of vllm serve; flags follow unless {port} is in it")
    add("--clients", type=int, default=2, help="client processes, each on a separate core")
    add("--tiny", action="store_true", help="a small model, and everything on the CPU")
    add("--time-limit", type=float, default=540, help="seconds for everything; then print what was measured")
    add("--start-seconds", type=float, default=100, help="start no setup if fewer are left, beside its first stream")
    add("--out", type=Path, help="write the document here after each row; continue one that is there")
    add("--merge", type=Path, nargs="+", help="measure nothing: merge documents of several sittings into one")
    return parser


def _size(text: str) -> str:
    """As it is written in rows. Raises ValueError."""
    return text if text == MIX else str(Size.of(text))


def _list(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Type of an option with values between commas."""

    def values(text: str) -> list[Any]:
        try:
            return list(dict.fromkeys(kind(each) for each in text.split(","))) if kind is not str else text.split(",")
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return values


def _settings(text: str) -> Settings:
    """Type of an option with settings of an engine: JSON, or a document in which a sweep found them."""
    try:
        found = json.loads(text if text.startswith("{") else Path(text).read_text(encoding="utf-8"))
        if "bench" in found and "local" not in found:
            raise argparse.ArgumentTypeError(f"{text} has no finished sweep")
        return Settings.of({"flags": {}, "environment": {}, **found.get("local", found)})
    except (OSError, ValueError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None
