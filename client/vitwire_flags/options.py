"""Fields of dataclasses as options of a command, for typer."""

from collections.abc import Callable
from copy import copy
from dataclasses import MISSING, field, fields, is_dataclass, replace
from functools import partial, wraps
from inspect import Parameter, signature
from types import EllipsisType
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

from typer import BadParameter
from typer.exceptions import TyperException
from typer.models import OptionInfo

from vitwire_flags.sizes import shown, size_of
from vitwire_flags.variables import is_injected

T = TypeVar("T")


def flag(
    default: T | EllipsisType,
    text: str,
    minimum: float | None = None,
    maximum: float | None = None,
    **details: Any,  # noqa: ANN401  # passed to OptionInfo
) -> T:
    """A field that is an option: its default (`...` if it is required), its help, and the bounds of a number.

    An option with `hide_input` is a secret: it is not in the representation of its dataclass. A tuple can be repeated.
    """
    option = OptionInfo(default=..., help=text, min=minimum, max=maximum, **details)
    value: Any = MISSING if default is ... else default
    return cast("T", field(default=value, repr=not option.hide_input, metadata={"option": option}))


def size(default: T, text: str, minimum: int = 0, maximum: int | None = None) -> T:
    """As `flag`, for a size in bytes that may have a unit."""

    def parsed(value: str | int) -> int:
        try:
            nbytes = size_of(str(value))
        except ValueError as error:
            raise BadParameter(str(error)) from None
        if nbytes < minimum or (maximum is not None and nbytes > maximum):
            most = "" if maximum is None else f" and at most {shown(maximum)}"
            raise BadParameter(f"must be at least {shown(minimum)}{most}, got {value}")
        return nbytes

    parsed.__name__ = "size"
    shown_default = shown(default) if default and isinstance(default, int) else True
    return flag(default, text, parser=parsed, metavar="<size>", show_default=shown_default)


def options_of(kind: type) -> dict[str, OptionInfo]:
    """The options among the fields of a dataclass.

    If the class has a `prefix`, each of them is also a variable; one that Kubernetes injected is not read.
    """
    prefix = getattr(kind, "prefix", "")
    options = {each.name: copy(each.metadata["option"]) for each in fields(kind) if each.metadata}
    for name, option in options.items():
        variable = f"{prefix}{name.upper()}" if prefix else option.envvar
        option.envvar = None if variable and is_injected(variable) else variable
    return options


def with_options(command: Callable[..., T]) -> Callable[..., T]:
    """The command as typer reads it: in place of each parameter that is a dataclass, the options among its fields.

    A default of such a parameter has the defaults of the options and the values of the other fields.
    """
    groups: dict[str, tuple[Callable[..., object], list[str]]] = {}
    parameters: list[Parameter] = []
    for each in signature(command).parameters.values():
        if not is_dataclass(each.annotation):
            parameters.append(each)
            continue
        kind = cast("type", each.annotation)
        options = options_of(kind)
        defaults = {own.name: getattr(each.default, own.name, own.default) for own in fields(kind)}
        groups[each.name] = kind if each.default is Parameter.empty else partial(replace, each.default), list(options)
        types = get_type_hints(kind)
        parameters += [_parameter(name, types[name], option, defaults[name]) for name, option in options.items()]

    @wraps(command)
    def flat(**values: object) -> T:
        for group, (make, names) in groups.items():
            given = {name: values.pop(name) for name in names}
            values[group] = make(**{name: tuple(it) if isinstance(it, list) else it for name, it in given.items()})
        return command(**values)

    flat.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {each.name: each.annotation for each in parameters}
    return flat


def message_of(error: TyperException) -> str:
    """One line about a wrong option, which names the variable or the TOML file that it is from."""
    ctx, param = getattr(error, "ctx", None), getattr(error, "param", None)
    found = ctx.get_parameter_source(param.name) if ctx and param else None
    source = found.name if found else ""
    if isinstance(error, BadParameter) and param and source == "ENVIRONMENT":
        error.param_hint = param.envvar
    message = error.format_message()
    return f"{message} ({ctx.params['config']})" if ctx and source == "DEFAULT_MAP" else message


def _parameter(name: str, annotation: Any, option: OptionInfo, default: Any) -> Parameter:  # noqa: ANN401  # typer's
    if get_origin(annotation) is tuple:
        annotation, default = list[get_args(annotation)[0]], list(default)  # type: ignore[misc]
    default = Parameter.empty if default is MISSING else default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[annotation, option])
