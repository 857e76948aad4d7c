"""Demo models that read a tower's rows to classify images, to retrieve them, or in an encoder-decoder."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from transformers import AutoModel, AutoModelForImageClassification

from vitwire_server.demo.demo_model import TEXT, DemoModel, Json
from vitwire_server.demo.models.tiles import TILES

_GEMMA3 = TILES["gemma3"]
_T5GEMMA2: Json = {
    "encoder": {**_GEMMA3.config, "text_config": {**TEXT, "dropout_rate": 0.0, "head_dim": 16}},
    "decoder": {**TEXT, "head_dim": 16},
    "tie_word_embeddings": False,
    "image_token_index": 500,
}

READERS: Mapping[str, DemoModel] = MappingProxyType(
    {
        "t5gemma2": replace(_GEMMA3, config=_T5GEMMA2),
        "t5gemma2_encoder": replace(_GEMMA3, config=_T5GEMMA2["encoder"], auto=AutoModel),
        "shieldgemma2": replace(_GEMMA3, auto=AutoModelForImageClassification),
    }
)
