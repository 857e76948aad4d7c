"""Modules of rows in a line each, by their class and the names of their weights, and rows that differ in the class."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from torch import nn

from vitwire_server.towers.family import Family, Module, in_model

Source: TypeAlias = str | type[nn.Module]
"""A `package.Class` of transformers, a `module:Class` of this package that is imported when it is used, or a class."""
Row = TypeVar("Row", bound=Family)


def stock(source: Source, prefixes: Mapping[str, str], **fields: Any) -> Module:  # noqa: ANN401 - other fields of Module
    """A module that is built of `vision_config`, or of the part of the configuration that `config` names."""
    return Module(source=_path(source), prefixes=prefixes, **fields)


def part(source: Source, prefixes: Mapping[str, str], **fields: Any) -> Module:  # noqa: ANN401 - other fields of Module
    """A module that is built of the checkpoint's whole configuration."""
    return stock(source, prefixes, **{"config": "", **fields})


def projector(
    source: Source,
    prefixes: Mapping[str, str] = in_model("multi_modal_projector."),
    **fields: Any,  # noqa: ANN401 - other fields of Module
) -> dict[str, Module]:
    """`beside` of a tower that only a projector follows; its prefixes are transformers' usual ones by default."""
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
