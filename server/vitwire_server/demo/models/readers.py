"""Demo models that read a tower's rows to classify images, to retrieve them, or in an encoder-decoder."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from transformers import AutoModel, AutoModelForImageClassification, AutoModelForMaskedLM, AutoModelForPreTraining

from vitwire_server.demo.demo_model import TEXT, VISION, DemoModel, Json
from vitwire_server.demo.models.idefics import IDEFICS
from vitwire_server.demo.models.llava import LLAVA
from vitwire_server.demo.models.tiles import TILES

_GEMMA3 = TILES["gemma3"]
_T5GEMMA2: Json = {
    "encoder": {**_GEMMA3.config, "text_config": {**TEXT, "dropout_rate": 0.0, "head_dim": 16}},
    "decoder": {**TEXT, "head_dim": 16},
    "tie_word_embeddings": False,
    "image_token_index": 500,
}
_MODERNVBERT = replace(
    IDEFICS["idefics3"],
    config={
        "image_token_id": 500,
        "pixel_shuffle_factor": 2,
        "text_config": {"model_type": "modernbert", **TEXT, "cls_token_id": 3, "pad_token_id": 0, "sep_token_id": 4},
        "vision_config": {"model_type": "siglip_vision_model", **VISION, "image_size": 56, "patch_size": 14},
    },
    auto=AutoModelForMaskedLM,
)
_ULTRABERT = {"model_type": "ultrabert", **TEXT, "num_hidden_layers": 6, "prediction_head_size": 64}


def _retriever(model_type: str, vlm: DemoModel) -> DemoModel:
    """Around a model of this type."""
    config = {"vlm_config": {"model_type": model_type, **vlm.config}, "embedding_dim": 16}
    return replace(vlm, config=config, auto=AutoModelForPreTraining)


READERS: Mapping[str, DemoModel] = MappingProxyType(
    {
        "t5gemma2": replace(_GEMMA3, config=_T5GEMMA2),
        "t5gemma2_encoder": replace(_GEMMA3, config=_T5GEMMA2["encoder"], auto=AutoModel),
        "colpali": _retriever("paligemma", LLAVA["paligemma"]),
        "modernvbert": _MODERNVBERT,
        "colmodernvbert": _retriever("modernvbert", _MODERNVBERT),
        "ultravbert": replace(_MODERNVBERT, config={**_MODERNVBERT.config, "text_config": _ULTRABERT}),
        "shieldgemma2": replace(_GEMMA3, auto=AutoModelForImageClassification),
    }
)
