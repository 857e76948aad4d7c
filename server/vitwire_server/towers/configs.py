"""Configurations of Hugging Face models, as far as towers read them."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from functools import reduce
from typing import Any, Protocol

from transformers import CONFIG_MAPPING

_USUAL = (
    "hidden_size",
    "image_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "patch_size",
)


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


def new_config(model_type: str, /, **fields: Any) -> Config:  # noqa: ANN401 - of the class
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
    """Type of the weights by config.json, whose field older releases of transformers call `torch_dtype`."""
    return settings.get("dtype") or settings.get("torch_dtype")


def last_layer(config: Config) -> None:
    """Raises ValueError unless rows are those of the last layer."""
    layer = getattr(config, "vision_feature_layer", -1)
    if layer != -1:
        raise ValueError(f"vision_feature_layer {layer} is not served, only -1, the last one, is")
