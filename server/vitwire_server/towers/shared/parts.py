"""Modules of entries in a line each, entries that differ in a class, and modules of what transformers keeps loose."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor, nn

from vitwire_server.towers.configs import Config, Served
from vitwire_server.towers.family import Family, Module, Weights, in_model

Source: TypeAlias = str | type[nn.Module]
"""A `package.Class` of transformers, a `module:Class` of this package that is imported when it is used, or a class."""
Row = TypeVar("Row", bound=Family)


class _Fields(TypedDict, total=False):
    """Other fields of `Module`."""

    renames: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...]
    convert: Callable[[Weights, Config], Weights]
    config: str
    arguments: Callable[[Config], tuple[Any, ...]]
    served: tuple[Served, ...]


def stock(source: Source, prefixes: Mapping[str, str], **fields: Unpack[_Fields]) -> Module:
    """A module that is built of `vision_config`, or of the part of the configuration that `config` names."""
    return Module(source=_path(source), prefixes=prefixes, **fields)


def part(source: Source, prefixes: Mapping[str, str], **fields: Unpack[_Fields]) -> Module:
    """A module that is built of the checkpoint's whole configuration."""
    return replace(stock(source, prefixes, **fields), config="")


def projector(
    source: Source,
    prefixes: Mapping[str, str] = in_model("multi_modal_projector."),
    **fields: Unpack[_Fields],
) -> dict[str, Module]:
    """`beside` of a tower that only a projector follows; the default prefixes are transformers' usual ones."""
    return {"projector": part(source, prefixes, **fields)}


def variant(row: Row, model_type: str, title: str, source: Source = "", **fields: Any) -> Row:  # noqa: ANN401 - other fields of the row
    """The same row for another model, whose tower is of another class if `source` names one."""
    tower = replace(row.tower, source=_path(source)) if source else row.tower
    return replace(row, **{"model_type": model_type, "title": title, "tower": tower, **fields})


def _path(source: Source) -> Source:
    if not isinstance(source, str) or ":" in source:
        return source
    package, name = source.split(".")
    return f"{package}.modeling_{package}:{name}"


class SingleParameter(nn.Module):
    """One parameter that transformers keeps on the whole model."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))


class Constants(nn.Module):
    """Tensors that follow from the size of a tile, in the types that they were computed in."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)
