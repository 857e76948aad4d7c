"""Demo models that read a tower's rows to classify images, to retrieve them, or in an encoder-decoder."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from transformers import AutoModel, AutoModelForImageClassification, AutoModelForPreTraining

from vitwire_server.demo.demo_model import TEXT, DemoModel, Json
from vitwire_server.demo.models.llava import LLAVA
from vitwire_server.demo.models.tiles import TILES

_GEMMA3 = TILES["gemma3"]
_T5GEMMA2: Json = {
    "encoder": {**_GEMMA3.config, "text_config": {**TEXT, "dropout_rate": 0.0, "head_dim": 16}},
    "decoder": {**TEXT, "head_dim": 16},
    "tie_word_embeddings": False,
    "image_token_index": 500,
}


def _retriever(model_type: str, vlm: DemoModel) -> DemoModel:
    """Around a model of this type."""
    config = {"vlm_config": {"model_type": model_type, **vlm.config}, "embedding_dim": 16}
    return replace(vlm, config=config, auto=AutoModelForPreTraining)


READERS: Mapping[str, DemoModel] = MappingProxyType(
    {
        "t5gemma2": replace(_GEMMA3, config=_T5GEMMA2),
        "t5gemma2_encoder": replace(_GEMMA3, config=_T5GEMMA2["encoder"], auto=AutoModel),
        "colpali": _retriever("paligemma", LLAVA["paligemma"]),
        "shieldgemma2": replace(_GEMMA3, auto=AutoModelForImageClassification),
    }
)
