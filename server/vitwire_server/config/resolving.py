"""Settings from flags, variables and a TOML file (`toml_file`); and messages for wrong ones."""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import typer
from typer.core import TyperOption
from typer.exceptions import TyperException

from vitwire_flags.options import message_of, options_of, with_options
from vitwire_flags.sizes import shown
from vitwire_flags.variables import ignored_variables, unknown_variables, with_variables
from vitwire_server.config.host import memory_limit
from vitwire_server.config.settings import ServeSettings, UsageError

_HEADINGS = {name: each.__doc__ for each in ServeSettings.__bases__ for name in each.__annotations__}


def resolve(arguments: Sequence[str]) -> ServeSettings:
    """Settings from flags, environment and TOML. Raises UsageError; `--help` exits."""
    try:
        settings = _command().main(list(arguments), "vitwire-server", standalone_mode=False)
        if not isinstance(settings, ServeSettings):  # the exit code of --help and the like
            sys.exit(settings)
        unknown = unknown_variables(settings.prefix, options_of(ServeSettings))
    except TyperException as error:
        raise UsageError(message_of(error)) from error
    except ValueError as error:
        raise UsageError(with_variables(str(error), ServeSettings.prefix)) from error
    if unknown and settings.strict_config:
        raise UsageError("; ".join(unknown))
    return settings


def warnings(settings: ServeSettings) -> list[str]:
    """Warnings about variables without effect, and about limits above the container's memory."""
    ignored = ignored_variables(settings.prefix, options_of(ServeSettings))
    limit = memory_limit()
    return ignored + list(_memory(settings, limit) if limit else ())


def log_format(arguments: Sequence[str]) -> str:
    """The log format that arguments ask for even if they are invalid, to report that; TOML is not read."""
    named = [value for flag, value in pairwise(arguments) if flag == "--log-format"]
    joined = [word.partition("=")[2] for word in arguments if word.startswith("--log-format=")]
    return (*named, *joined, os.environ.get(f"{ServeSettings.prefix}LOG_FORMAT", "text"))[0]


def _given(ctx: typer.Context, settings: ServeSettings) -> ServeSettings:
    sources = {name: ctx.get_parameter_source(name) for name in options_of(ServeSettings)}
    return replace(settings, given=frozenset(name for name, it in sources.items() if it and it.name != "DEFAULT"))


def _command() -> Any:  # noqa: ANN401  # typer has no public name for commands
    app = typer.Typer()
    names = {"help_option_names": ["-h", "--help"]}
    app.command(help=ServeSettings.__doc__, context_settings=names)(with_options(_given))
    command = typer.main.get_command(app)
    for each in command.params:
        if isinstance(each, TyperOption):
            each.rich_help_panel = _HEADINGS.get(each.name)
    return command


def _memory(settings: ServeSettings, limit: int) -> Iterator[str]:
    """Graph memory counts only for simulated graphs, and stored embeddings on the CPU: both are on the host then."""
    bounds = {"--max-queued-bytes": settings.max_queued_bytes, "--cache-bytes": settings.cache_bytes}
    if "cpu" in (settings.device, *settings.device_list):
        bounds["--store-bytes"] = settings.stored_bytes
    if settings.graphs == "simulated":
        bounds["--graph-memory"] = settings.graph_memory
    processes = max(1, len(settings.device_list))
    if processes * sum(bounds.values()) > limit:
        flags = " + ".join(f"{flag} {shown(value)}" for flag, value in bounds.items() if value)
        each = f" in each of {processes} processes" if processes > 1 else ""
        yield (
            f"the memory limit of this cgroup is {shown(limit)}, less than {flags}{each}: under load the kernel would "
            "kill the server; lower these settings or raise the limit"
        )
