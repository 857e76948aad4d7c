"""Gemma 4's projector, built of the checkpoint's whole configuration."""

from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder

from vitwire_server.towers.configs import Config


class Embedder(Gemma4MultimodalEmbedder):
    """From pooled rows to the language model's width."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.vision_config, config.text_config)
