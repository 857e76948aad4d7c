"""Settings from flags, environment variables and a TOML file; messages for wrong ones."""

import os
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError
from pydantic_settings import CliApp, SettingsError

from vitwire_server.config.command_line import source_of
from vitwire_server.config.host import memory_limit
from vitwire_server.config.settings import ServeSettings, UsageError
from vitwire_server.config.sources import PREFIX, ignored_settings, unknown_variables

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

FORMS = {
    "lora": "NAME=DIR, with a name of up to 64 letters, digits, dots and hyphens",
    "device": "auto, cpu, cuda or cuda:N",
    "devices": "none, or devices such as cuda:0,cuda:1",
    "otlp_endpoint": "host:port, http://host:port or https://host:port",
}
"""Values of fields with a pattern."""
_EXPECTED = {
    "bool_parsing": "on or off",
    "bool_type": "true or false",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a smaller number",
    "int_type": "a whole number",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "path_type": "a path",
    "string_type": "a string",
}
"""Allowed values, by pydantic's name of the error."""


def resolve(arguments: Sequence[str]) -> ServeSettings:
    """Settings from flags, environment and TOML. Raises UsageError; `--help` exits."""
    flags, config = _config(list(arguments))
    _refuse_negations()
    try:
        source = type("ServeSettings", (ServeSettings,), {"toml": config}) if config else ServeSettings
        settings: ServeSettings = CliApp.run(source, cli_args=flags, cli_settings_source=source_of(source))
    except ValidationError as error:
        raise UsageError("; ".join(_message(each, config) for each in error.errors())) from error
    except (SettingsError, ValueError, RecursionError) as error:
        raise UsageError(f"{config or 'settings'}: {error}") from error
    if settings.strict_config and (unknown := unknown_variables(ServeSettings.model_fields)):
        raise UsageError("; ".join(unknown))
    return settings


def warnings(settings: ServeSettings) -> list[str]:
    """Warnings about variables without effect, and about limits above the container's memory."""
    fields = ServeSettings.model_fields
    unknown = [f"ignored: {each}" for each in unknown_variables(fields)]
    limit = memory_limit()
    return [*ignored_settings(fields), *unknown, *(_memory(settings, limit) if limit else ())]


def _memory(settings: ServeSettings, limit: int) -> Iterator[str]:
    """Graph memory counts only for simulated graphs, and stored embeddings on the CPU: both are on the host then."""
    bounds = {"--max-queued-bytes": settings.max_queued_bytes, "--cache-bytes": settings.cache_bytes}
    if "cpu" in (settings.device, *settings.device_list):
        bounds["--store-bytes"] = settings.stored_bytes
    if settings.graphs == "simulated":
        bounds["--graph-memory"] = settings.graph_memory
    processes = max(1, len(settings.device_list))
    if processes * sum(bounds.values()) > limit:
        flags = " + ".join(f"{flag} {_size(value)}" for flag, value in bounds.items() if value)
        each = f" in each of {processes} processes" if processes > 1 else ""
        yield (
            f"the memory limit of this cgroup is {_size(limit)}, less than {flags}{each}: under load the kernel would "
            "kill the server; lower these settings or raise the limit"
        )


def _size(value: int) -> str:
    return f"{value / (1 << 30):.1f} GiB" if value >= 1 << 30 else f"{value / (1 << 20):.1f} MiB"


def log_format(arguments: Sequence[str]) -> str:
    """The log format that arguments ask for even if they are invalid, to report that; TOML is not read."""
    named = [value for flag, value in pairwise(arguments) if flag == "--log-format"]
    joined = [word.partition("=")[2] for word in arguments if word.startswith("--log-format=")]
    return (*named, *joined, os.environ.get(f"{PREFIX}LOG_FORMAT", "text"))[0]


def _config(arguments: list[str]) -> tuple[list[str], Path | None]:
    """Flags without `--config FILE`, and the file. Raises UsageError."""
    named = os.environ.get(f"{PREFIX}CONFIG")
    rest: list[str] = []
    flags = iter(arguments)
    for flag in flags:
        if flag == "--config" or flag.startswith("--config="):
            named = flag.partition("=")[2] or next(flags, "")
        else:
            rest.append(flag)
    if not named:
        return rest, None
    if not Path(named).is_file():
        raise UsageError(f"--config {named}: {'not a regular file' if Path(named).exists() else 'no such file'}")
    return rest, Path(named)


def _refuse_negations() -> None:
    """Raises UsageError for variables such as VITWIRE_NO_METRICS: only flags have a negative form."""
    for variable, value in os.environ.items():
        name = variable.upper().removeprefix(f"{PREFIX}NO_")
        field = ServeSettings.model_fields.get(name.lower())
        if value and name != variable.upper() and field and field.annotation is bool:
            raise UsageError(f"{variable}: unknown variable; set {PREFIX}{name}=off instead")


def _message(error: "ErrorDetails", config: Path | None) -> str:
    """One line about a wrong setting; `config` is the TOML file."""
    if error["type"] == "extra_forbidden":  # only TOML: argparse checks flags, unknown variables are warnings
        return _unknown_key(str(error["loc"][0]), config)
    name = "-".join(map(str, error["loc"]))
    if not name:
        return error["msg"].removeprefix("Value error, ")
    flag = f"--{name.replace('_', '-')}"
    if error["type"] == "missing":
        return f"{flag} is required: {ServeSettings.model_fields[name].description}"
    problem = error["msg"].removeprefix("Value error, ")
    if error["type"] == "string_pattern_mismatch":
        problem = f"expected {FORMS[name]}"
    elif expected := _EXPECTED.get(error["type"]):
        problem = "expected " + expected.format(**error.get("ctx", {})).replace("'", "")
    return f"{flag}: {problem} (got {error['input']!r})"


def _unknown_key(key: str, config: Path | None) -> str:
    name, fields = key.replace("-", "_"), ServeSettings.model_fields
    if name != key and name in fields:
        return f"{config}: unknown key {key}; keys have underscores: {name}"
    close = get_close_matches(name, fields, n=1, cutoff=0.7)
    return f"{config}: unknown key {key}" + (f"; did you mean {close[0]}?" if close else "")
