"""Demo models that read a tower's rows to classify images, to retrieve them, or in an encoder-decoder."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from transformers import AutoModelForImageClassification

from vitwire_server.demo.demo_model import DemoModel
from vitwire_server.demo.models.tiles import TILES

_GEMMA3 = TILES["gemma3"]

READERS: Mapping[str, DemoModel] = MappingProxyType(
    {
        "shieldgemma2": replace(_GEMMA3, auto=AutoModelForImageClassification),
    }
)
