"""ViT (Google)."""

from transformers import ViTConfig, ViTModel

from vitwire_server.towers.family import Family, Module, stripped
from vitwire_server.towers.layouts.plain import PlainEncoder, PlainFamily
from vitwire_server.towers.shared.pooling import MEAN, class_token


class Vit(ViTModel):
    """Without the layer behind the class token, which checkpoints of classifiers do not have."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config, add_pooling_layer=False)


_VIT = PlainFamily(
    model_type="vit",
    title="ViT",
    architecture="12 x 768, 24 x 1024 or 32 x 1280, patch 14, 16 or 32",
    tower=Module(
        source="vitwire_server.towers.models.vit:Vit",
        prefixes=stripped("vit.", ""),
        renames=(
            (r"^encoder\.layer\.", "layers."),
            (r"\.attention\.attention\.(q|k|v)(uery|ey|alue)\.", r".attention.\1_proj."),
            (r"\.attention\.output\.dense\.", ".attention.o_proj."),
            (r"\.intermediate\.dense\.", ".mlp.fc1."),
            (r"\.output\.dense\.", ".mlp.fc2."),
        ),
        ignored=("classifier.", "pooler."),
        config="",
    ),
    encoder=PlainEncoder,
    layers="layers",
    poolers=(class_token(), MEAN),
    processor="ViT",
    special="rows of the patches, after the last norm",
)

ROWS: tuple[Family, ...] = (_VIT,)
