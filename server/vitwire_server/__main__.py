"""`vitwire-server`: commands and their exit codes. With `serve.py` and `loading.py`, the composition root.

Nothing that takes time is imported before `main` has set its signal handlers: until then Ctrl-C would
end in a traceback.
"""

import os
import signal
import sys
from collections.abc import Sequence

_USAGE = """\
usage: vitwire-server [serve] [FLAGS]          serve a model's vision tower (the default)
       vitwire-server demo-checkpoint [FLAGS]  write a tiny VLM with random weights
       vitwire-server budgets [FLAGS]          fit budgets to recorded sizes, judge them on others
       vitwire-server COMMAND --help           flags of a command
"""
_SWITCH_SECONDS = 0.0005
"""How long the engine's thread may keep the interpreter while the event loop wants it; Python waits ten times that."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; the entry point of `vitwire-server`. Exits with its code."""
    for number in (signal.SIGTERM, signal.SIGINT):  # PID 1 has no handler of its own, and imports take seconds
        signal.signal(number, lambda *_: os._exit(0))
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = words.pop(0) if words and (words[0] == "--version" or not words[0].startswith("-")) else "serve"
    if words[:1] in (["-h"], ["--help"]) and command == "serve":
        sys.stdout.write(_USAGE + "\n")
    if command == "--version":
        from importlib.metadata import version  # noqa: PLC0415 - see above

        sys.stdout.write(f"vitwire-server {version('vitwire')}\n")
        sys.exit(0)
    commands = {"serve": _serve, "demo-checkpoint": _demo_checkpoint, "budgets": _budgets}
    if command not in commands:
        sys.stderr.write(_USAGE + f"\nno such command: {command}\n")
        sys.exit(2)
    try:
        sys.exit(commands[command](words))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("vitwire"):
            raise
        sys.stderr.write(f"vitwire-server: {error.name} is not installed: pip install 'vitwire[server]'\n")
        sys.exit(1)


def _serve(words: list[str]) -> int:
    """Settings are checked before torch is loaded, so that a typo is told at once."""
    # gRPC reads it when it is imported; without it, its core writes a line of its own for each failed handshake.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    import asyncio  # noqa: PLC0415 - each command loads only what it needs

    from vitwire.allocator import tune  # noqa: PLC0415 - as above
    from vitwire_server.resolving import resolve  # noqa: PLC0415 - each command loads only what it needs
    from vitwire_server.settings import UsageError  # noqa: PLC0415 - as above

    try:
        settings = resolve(words)
    except UsageError as error:
        return _fail(error, 2)
    if settings.device_list:
        from vitwire_server.supervisor import supervise  # noqa: PLC0415 - as above

        return asyncio.run(supervise(words, settings))
    tune()
    sys.setswitchinterval(_SWITCH_SECONDS)
    from vitwire_server.observe.logs import configure_logs  # noqa: PLC0415 - as above
    from vitwire_server.serve import serve  # noqa: PLC0415 - torch takes its allocator's settings as they are now
    from vitwire_server.towers.files import CheckpointError  # noqa: PLC0415 - as above

    configure_logs(settings.log_format, settings.log_level)
    try:
        code = asyncio.run(serve(settings))
        _leave_threads(code)
        return code
    except (CheckpointError, OSError) as error:
        return _fail(error, 1)
    except UsageError as error:
        return _fail(error, 2)


def _leave_threads(code: int) -> None:
    """Exit at once if a thread is still inside torch: the interpreter cannot finalise under it."""
    import threading  # noqa: PLC0415 - as above

    if any(thread.name in ("loading", "engine", "compiling") for thread in threading.enumerate()):
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None where it was closed before the start
            stream.flush()
        os._exit(code)


def _demo_checkpoint(words: list[str]) -> int:
    import argparse  # noqa: PLC0415 - as above
    from pathlib import Path  # noqa: PLC0415 - as above

    parser = argparse.ArgumentParser("vitwire-server demo-checkpoint", description="Write a tiny VLM in hub layout.")
    parser.add_argument("--model-type", required=True, help="model_type of config.json, such as qwen3_vl")
    parser.add_argument("--out", required=True, type=Path, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    options = parser.parse_args(words)
    from vitwire_server.towers.demo import write_demo_checkpoint  # noqa: PLC0415 - loads torch

    try:
        write_demo_checkpoint(options.model_type, options.out, seed=options.seed)
    except ValueError as error:
        return _fail(error, 2)
    except OSError as error:
        return _fail(error, 1)
    sys.stdout.write(f"{options.out}\n")
    return 0


def _budgets(words: list[str]) -> int:
    from vitwire_server.budgets import main as budgets  # noqa: PLC0415 - as above

    return budgets(words)


def _fail(error: Exception, code: int) -> int:
    sys.stderr.write(f"vitwire-server: {error}\n")
    return code


if __name__ == "__main__":
    main()
