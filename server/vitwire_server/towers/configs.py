"""Configurations of Hugging Face models, as far as towers read them, and checks of them before weights are read."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

from transformers import CONFIG_MAPPING, PreTrainedConfig

_USUAL = (
    "hidden_size",
    "image_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "patch_size",
)
_DEPTHS = ("depth", "num_hidden_layers")
"""Fields that hold a number of layers; of several, the first counts."""
_NUMBERED = re.compile(r"(?<=\.)\d+(?=\.)")
_LAYERS = re.compile(r"(depths?|layers)$")
"""Names of fields that say how many layers there are; in others of such names, numbers of layers are listed."""
_HEADS = ("attention_heads", "heads", "num_attention_heads", "num_groups", "num_heads")
"""Fields that hold a number of attention heads, or one for each stage."""
_MOST_LAYERS = 10_000
"""Layers in any part of a model; transformers makes a list as long as the number that config.json gives."""


class Config(Protocol):
    """A configuration of transformers of any class: fields by name."""

    def __getattribute__(self, name: str, /) -> Any: ...  # noqa: ANN401 - transformers types its fields in part only


def at(config: Config, path: str) -> Any:  # noqa: ANN401 - as above
    """The field of a configuration at a dotted path; all of it if the path is empty. Raises AttributeError."""
    return reduce(getattr, filter(None, path.split(".")), config)


def changed(config: Config, fields: Mapping[str, object]) -> Config:
    """A copy of a configuration with other values of some fields, which are named by dotted paths."""
    copied = deepcopy(config)
    for path, value in fields.items():
        parent, _, name = path.rpartition(".")
        setattr(at(copied, parent), name, value)
    return copied


def new_config(model_type: str, /, **fields: object) -> Config:
    """A configuration of transformers' class for this `model_type`. Raises what the class raises over its fields."""
    config_class: Any = CONFIG_MAPPING[model_type]
    config: Config = config_class(**fields)
    return config


def usual_fields(vision: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """The fields of a vision transformer that have their usual names in a config.json, and `more` that it may have."""
    return {name: vision[name] for name in (*_USUAL, *more) if name in vision}


def any_of(values: Iterable[object]) -> str:
    """The values that a field may have, in words."""
    return " or ".join(map(repr, values))


def require(name: str, value: object, *accepted: object, field: str = "") -> None:
    """Raises ValueError unless the field of this name has one of these values, which another `field` may have set."""
    if value not in accepted:
        raise ValueError(f"{name} is {value!r}, but must be {field}{', ' * bool(field)}{any_of(accepted)}")


def dtype_of(settings: Mapping[str, Any]) -> str | None:
    """Type of the weights by config.json or by its `text_config`; older releases of transformers say `torch_dtype`."""
    said = (own.get(name) for own in (settings, settings.get("text_config") or {}) for name in ("dtype", "torch_dtype"))
    return next(filter(None, said), None)


def last_layer(config: Config) -> None:
    """Raises ValueError unless rows are those of the last layer."""
    layer = getattr(config, "vision_feature_layer", -1)
    if layer != -1:
        raise ValueError(f"unsupported vision_feature_layer {layer}; supported: -1, the last layer")


@dataclass(frozen=True, slots=True)
class Served:
    """The supported values of one field."""

    field: str
    """Name within the module's configuration."""
    holds: Callable[[Any, Config], bool]
    """From the field's value and the module's configuration; may raise ArithmeticError or TypeError for False."""
    accepted: str
    """The accepted values, in words."""

    def problem(self, config: Config) -> str | None:
        """The problem with the value; None if there is none."""
        value = getattr(config, self.field)
        try:
            served = self.holds(value, config)
        except (ArithmeticError, TypeError):
            served = False
        return None if served else f"{self.field} is {value!r}, but must be {self.accepted}"


def one_of(field: str, *values: object) -> Served:
    """Requires that the field has one of these values."""
    return Served(field, lambda value, _: value in values, any_of(values))


def same_class(config: Config, expected: type[Any] | None) -> str | None:
    """The problem with a configuration of another class than its module takes; None if there is none."""
    if expected is None or isinstance(config, expected):
        return None
    return f"model_type is {config.model_type!r}, but must be {expected.model_type!r}"


def no_heads(config: Config) -> str | None:
    """The problem with a configuration that asks for less than one attention head; None if there is none."""
    for path, name, value in _fields(config):
        if name in _HEADS and min(_numbers(value), default=1) < 1:
            return f"{path} is {value}, but must be positive"
    return None


def surplus_layers(config: Config, names: Iterable[str]) -> str | None:
    """The problem with a configuration that asks for more layers than weights are named; None if there is none."""
    held = _most_layers(names)
    for path, layers in _depths(config):
        if layers > held:
            return f"{path} is {layers}, but the checkpoint holds weights of {held} layers"
    return None


def absurd_layers(settings: Mapping[str, Any]) -> str | None:
    """The problem with a config.json that asks for more layers than any model has; None if there is none."""
    for path, name, value in _fields(settings):
        if _LAYERS.search(name) and max(_numbers(value), default=0) > _MOST_LAYERS:
            return f"{path} is {value}, but must be at most {_MOST_LAYERS}"
    return None


def _fields(whole: object, outer: str = "") -> Iterator[tuple[str, str, Any]]:
    """Path, name and value of each field of a configuration or of a config.json, and of those within."""
    kind, fields = (dict, whole) if isinstance(whole, dict) else (PreTrainedConfig, vars(whole))
    for name, value in fields.items():
        if isinstance(value, kind):
            yield from _fields(value, f"{outer}{name}.")
        else:
            yield f"{outer}{name}", name, value


def _numbers(value: object) -> list[int]:
    """The numbers in a field that holds one or a list of them."""
    return [number for number in (value if isinstance(value, list | tuple) else [value]) if isinstance(number, int)]


def _most_layers(names: Iterable[str]) -> int:
    """The length of the longest numbered list of modules."""
    lists: dict[str, set[str]] = {}
    for name in names:
        dotted = f".{name}"
        for number in _NUMBERED.finditer(dotted):
            lists.setdefault(dotted[: number.start()], set()).add(number[0])
    return max(map(len, lists.values()), default=0)


def _depths(config: Config, path: str = "") -> Iterator[tuple[str, int]]:
    """Each number of layers that a configuration asks for, and its name."""
    name = next((name for name in _DEPTHS if isinstance(getattr(config, name, None), int)), None)
    if name:
        yield path + name, getattr(config, name)
    for key, inner in vars(config).items():
        if isinstance(inner, PreTrainedConfig):
            yield from _depths(inner, f"{path}{key}.")
