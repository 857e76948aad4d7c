"""Messages for wrong settings: flag, value and what is allowed."""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitwire_server.config.settings import ServeSettings

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

FORMS = {
    "lora": "NAME=DIR, with a name of up to 64 letters, digits, dots and hyphens",
    "device": "auto, cpu, cuda or cuda:N",
    "devices": "none, or devices such as cuda:0,cuda:1",
    "otlp_endpoint": "host:port, http://host:port or https://host:port",
}
"""What fields with a pattern take."""
_EXPECTED: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "bool_parsing": lambda _: "on or off",
    "bool_type": lambda _: "true or false",
    "finite_number": lambda _: "a finite number",
    "float_parsing": lambda _: "a number",
    "float_type": lambda _: "a number",
    "greater_than": lambda bounds: f"more than {bounds['gt']:g}",
    "greater_than_equal": lambda bounds: f"at least {bounds['ge']}",
    "int_from_float": lambda _: "a whole number",
    "int_parsing": lambda _: "a whole number",
    "int_parsing_size": lambda _: "a smaller number",
    "int_type": lambda _: "a whole number",
    "less_than_equal": lambda bounds: f"at most {bounds['le']}",
    "literal_error": lambda allowed: str(allowed["expected"]).replace("'", ""),
    "path_type": lambda _: "a path",
    "string_type": lambda _: "a string",
}
"""What is allowed, by pydantic's name of the error."""


def message(error: "ErrorDetails", config: Path | None) -> str:
    """One line about a wrong setting; `config` is the TOML file."""
    if error["type"] == "extra_forbidden":  # only TOML: argparse checks flags, unknown variables are warnings
        return _unknown_key(str(error["loc"][0]), config)
    name = "-".join(map(str, error["loc"]))
    if not name:
        return error["msg"].removeprefix("Value error, ")
    flag = f"--{name.replace('_', '-')}"
    if error["type"] == "missing":
        return f"{flag} is required: {ServeSettings.model_fields[name].description}"
    return f"{flag}: {_problem(error, name)} (got {error['input']!r})"


def _problem(error: "ErrorDetails", name: str) -> str:
    if error["type"] == "string_pattern_mismatch":
        return f"expected {FORMS[name]}"
    expected = _EXPECTED.get(error["type"])
    return f"expected {expected(error.get('ctx', {}))}" if expected else error["msg"].removeprefix("Value error, ")


def _unknown_key(key: str, config: Path | None) -> str:
    name, fields = key.replace("-", "_"), ServeSettings.model_fields
    if name != key and name in fields:
        return f"{config}: unknown key {key}; keys have underscores: {name}"
    close = get_close_matches(name, fields, n=1, cutoff=0.7)
    return f"{config}: unknown key {key}" + (f"; did you mean {close[0]}?" if close else "")
