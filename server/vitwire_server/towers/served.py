"""What a configuration has to say for its tower to be served: checked before any weight is read."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from vitwire_server.towers.configs import Config

_DEPTHS = ("depth", "num_hidden_layers")
"""Fields that hold a number of layers; where a configuration has several, the first counts."""
_NUMBERED = re.compile(r"(?<=\.)\d+(?=\.)")
_LAYERS = re.compile(r"(depths?|layers)$")
"""Names of fields that say how many layers there are; in others of such names, numbers of layers are listed."""
_HEADS = ("attention_heads", "heads", "num_attention_heads", "num_groups", "num_heads")
"""Fields that hold a number of attention heads, or one for each stage."""
_MOST_LAYERS = 10_000
"""Of any part of a model; transformers makes a list as long as the number that config.json gives."""


@dataclass(frozen=True, slots=True)
class Served:
    """The values of one field that are served."""

    field: str
    """Name within the module's configuration."""
    holds: Callable[[Any, Config], bool]
    """From the field's value and the module's configuration; may raise ArithmeticError or TypeError for False."""
    accepted: str
    """What the value must be, in words."""

    def problem(self, config: Config) -> str | None:
        """What is wrong about the value; None if nothing is."""
        value = getattr(config, self.field)
        try:
            served = self.holds(value, config)
        except (ArithmeticError, TypeError):
            served = False
        return None if served else f"{self.field} is {value!r}, but must be {self.accepted}"


def same_class(config: Config, expected: type[Any] | None) -> str | None:
    """What is wrong about the kind of a configuration; None if it is of the class that its module takes."""
    if expected is None or isinstance(config, expected):
        return None
    return f"model_type is {config.model_type!r}, but must be {expected.model_type!r}"


def no_heads(config: Config, path: str = "") -> str | None:
    """What is wrong where a configuration asks for less than one attention head; None if it does not."""
    for key, value in vars(config).items():
        found = None
        if isinstance(value, PreTrainedConfig):
            found = no_heads(value, f"{path}{key}.")
        elif key in _HEADS and _smallest(value) < 1:
            found = f"{path}{key} is {value}, but must be positive"
        if found:
            return found
    return None


def surplus_layers(config: Config, names: Iterable[str]) -> str | None:
    """What is wrong where a configuration asks for more layers than weights are named; None if it does not."""
    held = _most_layers(names)
    for path, layers in _depths(config):
        if layers > held:
            return f"{path} is {layers}, but the checkpoint holds weights of {held} layers"
    return None


def absurd_layers(settings: Mapping[str, Any], path: str = "") -> str | None:
    """What is wrong where a config.json asks for more layers than any model has; None if it does not."""
    for key, value in settings.items():
        found = None
        if isinstance(value, dict):
            found = absurd_layers(value, f"{path}{key}.")
        elif _LAYERS.search(key) and _largest(value) > _MOST_LAYERS:
            found = f"{path}{key} is {value}, but must be at most {_MOST_LAYERS}"
        if found:
            return found
    return None


def _largest(value: object) -> int:
    """The largest of a number or of a list of numbers; 0 where there is none."""
    numbers = value if isinstance(value, list) else [value]
    return max((number for number in numbers if isinstance(number, int)), default=0)


def _smallest(value: object) -> int:
    """The smallest of a number or of a list of numbers; 1 where there is none."""
    numbers = value if isinstance(value, list | tuple) else [value]
    return min((number for number in numbers if isinstance(number, int)), default=1)


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
