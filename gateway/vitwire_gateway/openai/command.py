"""`vitwire router`: the flags of the router's settings."""

import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Annotated, Any, get_args, get_type_hints

import typer

from vitwire.cli._connection import fail, reported, warn
from vitwire.shared.extras import remedy
from vitwire_gateway.openai.settings import Flag, Settings

PREFIX = "VITWIRE_ROUTER_"
_EXTRA = frozenset({"httpcore2", "httpx2", "PIL", "prometheus_client", "python_multipart", "starlette", "uvicorn"})


def unknown_variables(environment: Iterable[str]) -> list[str]:
    """Variables that look like settings of the router, such as misspelt ones."""
    known = {PREFIX + each.name.upper() for each in fields(Settings)}
    return sorted(name for name in environment if name.startswith(PREFIX) and name not in known)


def _with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """The command with one parameter for each setting, for typer to read."""
    hints = get_type_hints(Settings, include_extras=True)
    parameters = []
    for each in fields(Settings):
        kind, flag = get_args(hints[each.name])
        assert isinstance(flag, Flag)
        option = typer.Option(envvar=PREFIX + each.name.upper(), help=flag.help, min=flag.minimum)
        repeats = kind == tuple[str, ...]
        annotation = Annotated[list[str] if repeats else kind, option]  # type: ignore[valid-type]  # for typer only
        default = [] if repeats else each.default
        parameters.append(
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        )
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


@_with_flags
def router(**values: Any) -> None:  # noqa: ANN401  # one value for each setting
    """Serve OpenAI's API in front of vLLM or SGLang: images of chat requests are encoded by Vitwire.

    Every flag is also an environment variable: --engine-url is VITWIRE_ROUTER_ENGINE_URL.
    """
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    for name in unknown_variables(os.environ):
        warn(f"ignored: {name} is not a setting of the router")
    with reported():
        settings = Settings(**values)
        try:
            from vitwire_gateway.openai.serve import serve  # noqa: PLC0415  # needs the packages of the extra [router]
        except ImportError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in _EXTRA:
                raise
            fail(f"{missing} is not installed; {remedy('router')}")
        serve(settings)
