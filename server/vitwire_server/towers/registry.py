"""The table of models: one entry per `model_type`, or per kind of tower if a `model_type` has several."""

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import Any

from vitwire_server.towers import models
from vitwire_server.towers.family import Family

_MAKERS = (
    "qwen",
    "glm",
    "kimi",
    "minimax",
    "baidu",
    "internvl",
    "llava",
    "cohere",
    "gemma",
    "deepseek",
    "sam_ocr",
    "llama",
    "ovis",
    "microsoft",
    "step",
    "mistral",
    "minicpm",
    "aria",
    "siglip",
    "idefics",
    "lfm",
    "muse",
    "videollama",
    "granite_docling",
    "clip",
    "dino",
    "vit",
    "nvidia",
    "hunyuan",
    "rednote",
)
"""Modules of `models`, each with its `ROWS`, in the order of the tables of models."""

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {row.name: row for maker in _MAKERS for row in import_module(f"{models.__name__}.{maker}").ROWS}
)
"""By name, which is the `model_type` of an entry without a `tower_type`."""


def unsupported(model_type: object) -> str:
    """An error about a `model_type` that is not in the table, with those that are spelt like it."""
    known = {row.model_type for row in FAMILIES.values()}
    near = get_close_matches(str(model_type).lower(), sorted(known), n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    what = f"model_type {model_type!r} is not supported" if model_type else "config.json has no model_type"
    return f"{what}; {hint}docs/models.md lists the {len(known)} that are supported"


def family_of(settings: Mapping[str, Any]) -> Family | None:
    """The entry of a checkpoint by its config.json; None if its `model_type` is not in the table."""
    model_type, vision = settings.get("model_type"), settings.get("vision_config")
    if not model_type:
        named = (row for row in FAMILIES.values() if row.original and [row.original] == settings.get("architectures"))
        return next(named, None)
    kinds = [vision.get(field) for field in ("model_type", "model_name")] if isinstance(vision, dict) else []
    rows = (row for row in FAMILIES.values() if row.model_type == model_type and row.tower_type in kinds)
    return next(rows, None) or FAMILIES.get(str(model_type))
