"""An entry of the table of models: what every model declares, for every layout of pixels."""

import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from transformers import AutoConfig

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Preprocessing
from vitwire_server.core.pooling import Pooling
from vitwire_server.towers.configs import Config, Served, at, no_heads, same_class

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vitwire_server.towers.tower import Tower

Weights = dict[str, "Tensor"]
TESTED = ("5.17.0", "5.23.0", "5.24.0")
"""Releases of transformers with which every model is tested, by `make test TIER=versions`; oldest first."""
Parts = Mapping[str, Any]
"""Loaded modules by name; those of transformers are typed in part only."""


def stripped(*prefixes: str) -> dict[str, str]:
    """Prefixes that are left out of a module's names."""
    return dict.fromkeys(prefixes, "")


def in_model(*names: str) -> dict[str, str]:
    """Prefixes of a module that checkpoints hold by one of these names, within `model.` or without."""
    return stripped(*(f"{outer}{name}" for name in names for outer in ("model.", "")))


def unchanged(weights: Weights, _: Config) -> Weights:
    """Weights that are stored as the module holds them."""
    return weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module to load: its class, its configuration, and what its weights are called in checkpoints."""

    source: "str | type[nn.Module]"
    """Its class, or `module:Class`; `transformers.models.` is left out, modules of this package are named in full."""
    prefixes: Mapping[str, str]
    """Beginnings of its weights' names in checkpoints of any layout, and what replaces them in the module."""
    renames: tuple[tuple[str, str], ...] = ()
    """Regular expressions and what they become, one after the other, once the prefix is replaced."""
    ignored: tuple[str, ...] = ()
    """Beginnings of renamed names that the module has no use for."""
    convert: Callable[[Weights, Config], Weights] = unchanged
    """From renamed weights, and this module's configuration, to the weights of the module.

    Linear in the weights, and content with a part of them.
    """
    config: str = "vision_config"
    """Path of its configuration within the checkpoint's; empty for the whole."""
    arguments: Callable[[Config], tuple[Any, ...]] | None = None
    """From its configuration to the arguments of its class, if that takes more or other than the configuration.

    The first of them is the configuration if the class is a model of transformers.
    """
    served: tuple[Served, ...] = ()
    """Fields of its configuration of which not every value is supported."""

    def resolve(self) -> "type[nn.Module]":
        """The class. Raises ImportError or AttributeError if transformers has none."""
        if not isinstance(self.source, str):
            return self.source
        path, name = self.source.split(":")
        package = path if path.startswith("vitwire_server.") else f"transformers.models.{path}"
        found: type[nn.Module] = getattr(importlib.import_module(package), name)
        return found

    def called_with(self, config: Config) -> tuple[Any, ...]:
        """The arguments of its class; `config` is its part of a checkpoint's configuration."""
        return self.arguments(config) if self.arguments else (config,)

    def make(self, config: Config) -> "nn.Module":
        """A new module; `config` is its part of a checkpoint's configuration."""
        return self.resolve()(*self.called_with(config))

    def configuration(self, whole: Config) -> Config:
        """This module's part of a checkpoint's configuration. Raises AttributeError."""
        own: Config = at(whole, self.config)
        return own

    def problem(self, whole: Config) -> str | None:
        """The problem with a checkpoint's configuration, or None. Raises AttributeError over a missing field."""
        own = self.configuration(whole)
        expected = getattr(self.resolve(), "config_class", None)
        if expected and isinstance(whole, expected):  # transformers 5.17 names the whole model's class for some towers
            expected = None
        found = same_class(own, expected) or no_heads(own)
        found = found or next(filter(None, (each.problem(own) for each in self.served)), None)
        return self.named(found) if found else None

    def named(self, problem: str) -> str:
        """A problem with one of its fields, by the field's name in the checkpoint's configuration."""
        return f"{self.config}.{problem}" if self.config else problem

    def name(self, key: str) -> str | None:
        """The name of a checkpoint's weight in this module, before conversion; None if it is not part of it."""
        prefix = next((each for each in self.prefixes if key.startswith(each)), None)
        if prefix is None:
            return None
        name = self.prefixes[prefix] + key.removeprefix(prefix)
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return None if name.startswith(self.ignored) else name


def always(_: Config) -> bool:
    """Checkpoints of any configuration have it."""
    return True


class Pool(NamedTuple):
    """Makes one row of the tokens of each tile, or of each packed segment."""

    width: int
    row: "Callable[..., Tensor]"
    """For tiles: class and register tokens `(tiles, n, C)` and patches `(tiles, patches, C)` to `(tiles, width)`.

    Of segments: patches `(patches, C)`, their ends `(segments + 1,)` and the longest's length to `(segments, width)`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooler:
    """Makes one row of each image, or of each frame of a clip; a part that entries of the table name."""

    pooling: Pooling
    make: Callable[[Parts, Config], Pool]
    """From the loaded modules and the checkpoint's configuration."""
    modules: Mapping[str, Module] = field(default_factory=dict)
    """Modules that are loaded for it, by name."""
    offered: Callable[[Config], bool] = always
    """True for configurations of checkpoints that have it."""


ReadConfig = Callable[[Path, Mapping[str, Any]], Config]
"""From a checkpoint's directory and its config.json to its configuration, of a class of transformers.

Raises KeyError, TypeError or ValueError over a model that is not supported, CheckpointError over another file.
"""


def of_transformers(folder: Path, _: Mapping[str, Any]) -> Config:
    """The configuration that transformers reads. Raises what it raises over one that is broken."""
    config: Config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return config


class Accepts(StrEnum):
    """Forms in which clients may send a modality, in the words of the table of models."""

    PICTURES = "yes"
    """Images or frames, which are prepared as the model's processor does."""
    PIXELS = "pixels only"
    """The output of the model's processor."""
    NOTHING = "no"


@dataclass(frozen=True, kw_only=True)
class Family(ABC):
    """An entry of the table: what to load of a `model_type`, and how to build its tower."""

    model_type: str = field(kw_only=False)
    """`model_type` of the checkpoint's config.json."""
    title: str = field(kw_only=False)
    """The models' published name."""
    tower_type: str = ""
    """`vision_config.model_type` or `model_name`, if another entry of this `model_type` has all other towers."""
    original: str = ""
    """Class of the makers' code, by which `architectures` names checkpoints that have no `model_type`."""
    tower: Module
    beside: Mapping[str, Module] | None = None
    """Other modules that rows pass through, such as a projector, by name."""
    poolers: tuple[Pooler, ...] = ()
    """Ways to pool rows; of several for one pooling, the first that the checkpoint has is used."""
    pooler: Pooler | None = None
    """The one that is served, set by `pooled`; None for rows that are not pooled."""
    transformers: str = TESTED[0]
    """Oldest release of transformers that computes this tower correctly."""
    in_code: bool = False
    """The authors' processor has its settings in its code or in config.json, so checkpoints need no file for images."""
    images: Accepts = Accepts.PICTURES
    videos: Accepts = Accepts.PICTURES
    video_processor: str = ""
    """Class of the model's video processor, by the beginning of its name, if the checkpoint names none."""
    converts: bool = True
    """The class of the model's processor converts images to RGB unless the checkpoint's files say otherwise."""
    configuration: ReadConfig = of_transformers
    """Reads a checkpoint's configuration."""
    layout: ClassVar[str]
    """Shape of the family's pixels, for the table of models."""

    @property
    def name(self) -> str:
        """Its name in the table: the `model_type`, followed by the kind of tower if another entry has the former."""
        return "-".join(filter(None, (self.model_type, self.tower_type.removesuffix("_vision_model"))))

    @property
    def prunes(self) -> bool:
        """True if each token of a clip is of one frame, so that it can be pruned."""
        return self.pooler is None

    @property
    def modules(self) -> dict[str, Module]:
        """Everything to load, by name."""
        return {"tower": self.tower, **(self.beside or {}), **(self.pooler.modules if self.pooler else {})}

    def poolings(self, config: Config) -> tuple[Pooling, ...]:
        """The poolings that a checkpoint of this configuration offers."""
        offered = [pooler.pooling for pooler in self.poolers if pooler.offered(config)]
        return (Pooling.NONE, *dict.fromkeys(offered))

    def pooled(self, pooling: Pooling, config: Config) -> Self:
        """The same entry with rows pooled. Raises ValueError if checkpoints of this configuration do not offer it."""
        if pooling not in self.poolings(config):
            offered = ", ".join(self.poolings(config))
            raise ValueError(f"{self.title} ({self.model_type}) offers {offered}")
        found = (each for each in self.poolers if each.pooling is pooling and each.offered(config))
        return replace(self, pooler=next(found, None))

    def nested(self, prefix: str, model_type: str, title: str, **fields: Any) -> Self:  # noqa: ANN401 - of the entry
        """The entry of checkpoints that hold the same modules as parts of a larger model, by names with this prefix."""

        def inside(module: Module) -> Module:
            return replace(module, prefixes={f"{prefix}{name}": own for name, own in module.prefixes.items()})

        beside = {name: inside(module) for name, module in (self.beside or {}).items()}
        outer = {"model_type": model_type, "title": title, **fields}
        return replace(self, tower=inside(self.tower), beside=beside, **outer)

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Config:
        """The checkpoint's configuration; `settings` is its config.json. Raises what `configuration` raises."""
        return self.configuration(folder, settings)

    @abstractmethod
    def build(self, parts: Parts, config: Config) -> "Tower":
        """The tower around its loaded modules; `config` is the whole checkpoint's."""

    @abstractmethod
    def preprocessing(self, folder: Path, config: Config) -> dict[Modality, Preprocessing]:
        """Settings of the checkpoint's processor for each modality it takes. Raises CheckpointError."""
