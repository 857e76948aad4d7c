"""`vitwire router` and `vitwire sglang-encoder`: their flags are the fields of their settings."""

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, fields
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from vitwire.cli._connection import fail, reported, warn
from vitwire.shared.extras import remedy
from vitwire_gateway.gateway_settings import Flag, GatewaySettings, RouterSettings, SglangSettings

S = TypeVar("S", bound=GatewaySettings)

_PREFIX = RouterSettings.prefix
_ROUTER_VARIABLES = {each.name: _PREFIX + each.name.upper() for each in fields(RouterSettings)}
_CLIENT_VARIABLES = {"target": "VITWIRE_TARGET", "token": "VITWIRE_TOKEN"}


def _flagged(kind: type[S], variables: Mapping[str, str]) -> Callable[[Callable[[S], None]], Callable[..., None]]:
    """A command from a function of settings: with one parameter for each setting, for typer to read."""

    def flagged(serve: Callable[[S], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:  # noqa: ANN401  # one value for each setting
            known = variables.values()
            for name in sorted(os.environ):
                if name.startswith(_PREFIX) and name not in known and variables is _ROUTER_VARIABLES:
                    warn(f"ignored: {name} is not a setting of the router")
            repeated = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
            with reported():
                serve(kind(**values | repeated))

        hints = get_type_hints(kind, include_extras=True)
        parameters = [_parameter(each, hints[each.name], variables.get(each.name)) for each in fields(kind)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        command.__name__, command.__doc__ = serve.__name__, serve.__doc__
        return command

    return flagged


def _parameter(setting: "Field[Any]", hint: object, variable: str | None) -> inspect.Parameter:
    kind, flag = get_args(hint)
    assert isinstance(flag, Flag)
    names = [f"--{setting.name.replace('_', '-')}"] if setting.name.startswith("no_") else []  # no --no-no-engine
    option = typer.Option(*names, envvar=variable, help=flag.help, min=flag.minimum, max=flag.maximum)
    repeats = get_origin(kind) is tuple
    default = [] if repeats else setting.default
    annotation = Annotated[list[get_args(kind)[0]] if repeats else kind, option]  # type: ignore  # noqa: PGH003  # typer's
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@contextmanager
def _installed(extra: str) -> Iterator[None]:
    """A missing package ends the command with the way to install it, as part of an extra."""
    try:
        yield
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if not missing or missing.startswith("vitwire"):
            raise
        fail(f"{missing} is not installed; {remedy(extra)}")


def _check_otlp(settings: GatewaySettings) -> None:
    """End the command if a collector is set that nothing can be sent to."""
    if settings.otlp_endpoint:
        with _installed("otlp"):
            import vitwire.shared.telemetry  # noqa: F401, PLC0415


@_flagged(RouterSettings, _ROUTER_VARIABLES)
def router(settings: RouterSettings) -> None:
    """Serve OpenAI's API in front of vLLM or SGLang: images of chat requests are encoded by Vitwire.

    Every flag is also an environment variable: --engine-url is VITWIRE_ROUTER_ENGINE_URL.
    """
    _check_otlp(settings)
    with _installed("router"):
        from vitwire_gateway.router.router_process import serve  # noqa: PLC0415
    serve(settings)


@_flagged(SglangSettings, _CLIENT_VARIABLES)
def sglang_encoder(settings: SglangSettings) -> None:
    """Serve SGLang's encoder protocol: a --language-only SGLang uses Vitwire as its --encoder-urls."""
    _check_otlp(settings)
    with _installed("sglang"):
        from vitwire_gateway.sglang.encoder_process import serve  # noqa: PLC0415
    serve(settings)
