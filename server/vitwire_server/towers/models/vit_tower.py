"""ViT's and DeiT's towers, imported only for checkpoints of them."""

from transformers import DeiTConfig, DeiTModel, ViTConfig, ViTModel


class Vit(ViTModel):
    """Without the layer behind the class token, which checkpoints of classifiers do not have."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config, add_pooling_layer=False)


class Deit(DeiTModel):
    """Without that layer."""

    def __init__(self, config: DeiTConfig) -> None:
        super().__init__(config, add_pooling_layer=False)
