"""From flags, environment variables and a TOML file to settings, and what is told of those that are wrong."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_settings import CliApp, SettingsError

from vitwire_server.settings import PREFIX, ServeSettings, UsageError


def resolve(arguments: Sequence[str]) -> ServeSettings:
    """Settings from flags, environment and TOML. Raises UsageError; `--help` exits."""
    flags, config = _config(list(arguments))
    _refuse_negations()
    try:
        source = type("ServeSettings", (ServeSettings,), {"toml": config}) if config else ServeSettings
        return CliApp.run(source, cli_args=flags)
    except ValidationError as error:
        raise UsageError("; ".join(_told(each, config) for each in error.errors())) from error
    except (SettingsError, ValueError, RecursionError) as error:
        raise UsageError(f"{config or 'settings'}: {error}") from error


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
        raise UsageError(f"--config {named}: no such file")
    return rest, Path(named)


def _refuse_negations() -> None:
    """`--no-metrics` has no variable of its own. Raises UsageError if one is set."""
    for variable, value in os.environ.items():
        name = variable.upper().removeprefix(f"{PREFIX}NO_")
        field = ServeSettings.model_fields.get(name.lower())
        if value and name != variable.upper() and field and field.annotation is bool:
            raise UsageError(f"{variable}: no such variable; set {PREFIX}{name}=off instead")


def _told(error: Any, config: Path | None) -> str:  # noqa: ANN401 - pydantic's ErrorDetails, of another package
    if error["type"] == "extra_forbidden":  # flags are argparse's, other variables nobody's
        return _unknown_key(str(error["loc"][0]), config)
    field = "-".join(map(str, error["loc"])).replace("_", "-")
    given = "" if error["type"] == "missing" else f" (got {error['input']!r})" if field else ""
    told = str(error["msg"]).removeprefix("Value error, ")
    return f"--{field}: {told}{given}" if field else told


def _unknown_key(key: str, config: Path | None) -> str:
    name = key.replace("-", "_")
    meant = f"; keys have underscores: {name}" if name != key and name in ServeSettings.model_fields else ""
    return f"{config}: no such key: {key}{meant}"
