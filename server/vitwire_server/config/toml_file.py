"""The TOML file of `--config`."""

import tomllib
from difflib import get_close_matches
from pathlib import Path

import typer


def read_toml(ctx: typer.Context, file: Path | None) -> Path | None:
    """Callback of the flag that names the file: its keys become the defaults of the other flags.

    Raises BadParameter for a file that cannot be read, an unknown key, or a value that no flag could have.
    """
    if file is None:
        return None
    if not file.is_file():
        raise typer.BadParameter(f"{file}: {'not a regular file' if file.exists() else 'no such file'}")
    switches = {str(each.name): bool(getattr(each, "is_flag", False)) for each in ctx.command.params}
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
        ctx.default_map = {key: _value(key, value, switches) for key, value in values.items()}
    except (OSError, ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{file}: {error}") from error
    return file


def _value(key: str, value: object, switches: dict[str, bool]) -> bool | str:
    """A boolean for a switch, or what the variable would have. Raises ValueError."""
    if key not in switches:
        raise ValueError(f"unknown key {key}{_meant(key, switches)}")
    if isinstance(value, bool):
        if not switches[key]:
            raise ValueError(f"{key}: expected a number or a string, not a boolean")
        return value
    if isinstance(value, list) and value and all(type(each) in (int, str) for each in value):
        return ",".join(map(str, value))
    if isinstance(value, int | float | str):
        return str(value)
    raise ValueError(f"{key}: expected a number, a string, or a list of numbers or strings")


def _meant(key: str, names: dict[str, bool]) -> str:
    if key.replace("-", "_") in names:
        return f"; keys have underscores: {key.replace('-', '_')}"
    close = get_close_matches(key, names, n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""
