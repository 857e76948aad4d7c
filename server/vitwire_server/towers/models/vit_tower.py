"""ViT's tower, imported only where it is served."""

from transformers import ViTConfig, ViTModel


class Vit(ViTModel):
    """Without the layer behind the class token, which checkpoints of classifiers do not have."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config, add_pooling_layer=False)
