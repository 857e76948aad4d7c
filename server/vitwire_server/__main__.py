"""`vitwire-server`: commands and their exit codes. With `process/`, the composition root.

Slow imports happen inside functions, after `main` has set its signal handlers: before that, Ctrl-C would
print a traceback.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pkgutil import resolve_name
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from vitwire_server.config.settings import ServeSettings

_USAGE = """\
usage: vitwire-server [serve] [FLAGS]          serve a model's vision tower (the default)
       vitwire-server download MODEL --to DIR  fetch what serve reads of a model on the Hugging Face Hub
       vitwire-server demo-checkpoint [FLAGS]  write a tiny VLM with random weights
       vitwire-server budgets [FLAGS]          fit budgets to a trace of item sizes
       vitwire-server COMMAND --help           flags of a command
"""
_SWITCH_SECONDS = 0.0005
"""Interval at which the engine thread yields the GIL to the event loop; Python's default is ten times longer."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; the entry point of `vitwire-server`. Exits with its code."""
    _open_closed_streams()
    # Read when torch is imported: else OpenMP's threads spin at barriers, for as long as one waits for a busy core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # PID 1 has no default, and imports take seconds
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda *_: os._exit(0))
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = words.pop(0) if words and (words[0] == "--version" or not words[0].startswith("-")) else "serve"
    if words[:1] in (["-h"], ["--help"]) and command == "serve":
        sys.stdout.write(_USAGE + "\n")
    if command == "--version":
        from vitwire_server.release import release

        sys.stdout.write(f"vitwire-server {release()}\n")
        sys.exit(0)
    if command == "edge":
        _serve_edge()
    if command not in _COMMANDS:
        sys.stderr.write(_USAGE + f"\nunknown command: {command}\n")
        sys.exit(2)
    try:
        sys.exit(_COMMANDS[command](words))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("vitwire"):
            raise
        from vitwire.shared.extras import remedy

        extra = "plots" if (error.name or "").startswith("matplotlib") else "server"
        sys.stderr.write(f"vitwire-server: {error.name} is not installed; {remedy(extra)}\n")
        sys.exit(1)


def _open_closed_streams() -> None:
    """Streams that were closed before the start write to nowhere: their descriptors must not become those of pipes."""
    for name, descriptor in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
            setattr(sys, name, open(opened, "w" if descriptor else "r"))  # noqa: PTH123, SIM115 - by descriptor


def _serve(words: list[str]) -> int:
    """Settings and the model's directory are checked before torch is loaded and ports are announced."""
    # gRPC reads it when it is imported; else its core writes lines in no format and without bound: for each
    # failed handshake, and even as ERROR for each compressed message.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import asyncio
    import logging

    from vitwire_children.confine import be_private
    from vitwire_children.heartbeat import inherited
    from vitwire_server.config.resolving import log_format, resolve, warnings
    from vitwire_server.config.settings import UsageError
    from vitwire_server.observe.logs import configure_logs
    from vitwire_server.rpc.addresses import raise_if_ports_taken
    from vitwire_server.towers.files import CheckpointError, local_folder

    be_private()
    heartbeat = inherited()
    try:
        settings = resolve(words)
    except UsageError as error:
        return _fail(error, 2, log_format(words))
    configure_logs(settings.log_format, settings.log_level)
    if heartbeat is None:  # else the supervisor has logged them
        for warning in warnings(settings):
            logging.getLogger(__name__).warning("%s", warning)
    try:
        local_folder(settings.model)
        for flag, ports in settings.port_ranges.items():
            raise_if_ports_taken(settings.hosts[flag], flag, ports)
    except (CheckpointError, OSError) as error:
        return _fail(error, 1, settings.log_format)
    if not settings.device_list:
        return _serve_device(settings, heartbeat)
    from vitwire_server.process.device_supervisor import supervise

    return asyncio.run(supervise(words, settings))


def _serve_edge() -> NoReturn:
    """Speak gRPC for an engine; started by `serve --rpc-processes` only."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from vitwire_children.heartbeat import inherited, with_heartbeat

    heartbeat = inherited()  # before slow imports: from now on the process dies with the engine's
    import asyncio

    from vitwire.shared.allocator import tune
    from vitwire_children.confine import be_private
    from vitwire_server.process.edge import serve_edge

    async def run() -> NoReturn:
        _leave(await with_heartbeat(heartbeat, serve_edge()))

    be_private()
    tune()
    asyncio.run(run())


def _serve_device(settings: "ServeSettings", heartbeat: int | None) -> NoReturn:
    import asyncio

    from vitwire.shared.allocator import tune
    from vitwire_children.heartbeat import with_heartbeat
    from vitwire_server.config.settings import UsageError

    tune()
    sys.setswitchinterval(_SWITCH_SECONDS)
    _import_torch(settings.device)
    from vitwire_server.process.serve import serve  # torch takes its allocator's settings as they are now
    from vitwire_server.towers.files import CheckpointError

    async def run() -> NoReturn:
        try:
            code = await with_heartbeat(heartbeat, serve(settings))
        except (CheckpointError, OSError, UsageError) as error:
            code = _fail(error, 2 if isinstance(error, UsageError) else 1, settings.log_format)
        _leave(code)

    asyncio.run(run())


def _import_torch(device: str) -> None:
    """Import torch with all cores on CPU and one thread on CUDA, unless OMP_NUM_THREADS is set.

    On CUDA, torch uses threads to copy into pinned memory; with several processes, large pools compete for cores.
    """
    from vitwire_server.config.host import THREADS, cores

    explicit = THREADS in os.environ
    os.environ.setdefault(THREADS, str(cores() if device == "cpu" else 1))
    import torch

    if device == "auto" and not explicit and not torch.cuda.is_available():
        os.environ[THREADS] = str(cores())
        torch.set_num_threads(cores())


def _leave(code: int) -> NoReturn:
    """Exit without finalising the interpreter: daemon threads may be in torch, or hold the lock of an output stream.

    Called on the event loop, whose end would wait for threads that hang, and cancel RPCs that gRPC is still ending,
    which gRPC logs as errors.
    """
    import logging

    logging.shutdown()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it was closed before the start
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _download(words: list[str]) -> int:
    import argparse
    from pathlib import Path

    parser = argparse.ArgumentParser(
        "vitwire-server download",
        description="Fetch the configuration and the vision weights of a model. Interrupted downloads continue.",
        epilog="HF_TOKEN is used for gated models, HF_ENDPOINT for a mirror of the Hub.",
    )
    parser.add_argument("model", help="id on the Hugging Face Hub, such as Qwen/Qwen3-VL-8B-Instruct")
    parser.add_argument("--to", required=True, type=Path, metavar="DIR", help="directory for the files")
    parser.add_argument("--revision", default="main", help="branch, tag or commit (default: main)")
    options = parser.parse_args(words)
    from vitwire_server.towers.checkpoints.downloading import download_model  # loads torch
    from vitwire_server.towers.files import CheckpointError

    try:
        download_model(options.model, options.revision, options.to, lambda line: print(line, flush=True))
    except (CheckpointError, OSError) as error:
        return _fail(error, 1)
    return 0


def _demo_checkpoint(words: list[str]) -> int:
    import argparse
    from pathlib import Path

    parser = argparse.ArgumentParser("vitwire-server demo-checkpoint", description="Write a tiny VLM in hub layout.")
    help_of_type = "model_type of config.json: one of docs/models.md, such as qwen3_vl or clip"
    parser.add_argument("--model-type", required=True, help=help_of_type)
    parser.add_argument("--out", required=True, type=Path, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    options = parser.parse_args(words)
    from vitwire_server.demo.checkpoint import write_demo_checkpoint  # loads torch

    try:
        write_demo_checkpoint(options.model_type, options.out, seed=options.seed)
    except (OSError, ValueError) as error:
        return _fail(error, 2 if isinstance(error, ValueError) else 1)
    sys.stdout.write(f"{options.out}\n")
    return 0


def _fail(error: Exception, code: int, log_format: str = "text") -> int:
    from vitwire_server.observe.logs import plain_line

    sys.stderr.write(plain_line(f"vitwire-server: {error}", log_format, "error") + "\n")
    return code


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "serve": _serve,
    "download": _download,
    "demo-checkpoint": _demo_checkpoint,
    "budgets": lambda words: int(resolve_name("vitwire_server.fitting.command:main")(words)),
}

if __name__ == "__main__":
    main()
