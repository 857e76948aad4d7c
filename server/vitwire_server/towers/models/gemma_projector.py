"""Gemma 4's projector, built of the checkpoint's whole configuration."""

from typing import Any

from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder


class Embedder(Gemma4MultimodalEmbedder):
    """From pooled rows to the language model's width."""

    def __init__(self, config: Any) -> None:  # noqa: ANN401 - configurations are of many classes
        super().__init__(config.vision_config, config.text_config)
