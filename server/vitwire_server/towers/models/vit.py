"""ViT (Google), and towers of its form: DeiT, ViT-MSN, I-JEPA and the encoder of ViT-MAE (Meta)."""

from dataclasses import replace

from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Parts, stripped
from vitwire_server.towers.layouts.plain import PlainEncoder, PlainFamily
from vitwire_server.towers.shared.parts import part, variant
from vitwire_server.towers.shared.pooling import MEAN, class_token


def _mae(family: PlainFamily, parts: Parts, config: Config) -> PlainEncoder:
    """The stock forward masks patches: here it takes all, in their order, without a mask or an order to restore."""
    parts["tower"].embeddings.random_masking = lambda patches, noise: (patches, None, None)  # noqa: ARG005
    return PlainEncoder(family, parts, config)


_VIT = PlainFamily(
    "vit",
    "ViT",
    tower=part(
        "vit.ViTModel",
        stripped("vit.", ""),
        arguments=lambda config: (config, False),  # without the layer behind the class token, which classifiers lack
        renames=(
            (r"^encoder\.layer\.", "layers."),
            (r"\.attention\.attention\.(q|k|v)(uery|ey|alue)\.", r".attention.\1_proj."),
            (r"\.attention\.output\.dense\.", ".attention.o_proj."),
            (r"\.intermediate\.dense\.", ".mlp.fc1."),
            (r"\.output\.dense\.", ".mlp.fc2."),
        ),
        ignored=("classifier.", "pooler."),
    ),
    encoder=PlainEncoder,
    layers="layers",
    poolers=(class_token(), MEAN),
    processor="ViT",
)

ROWS = (
    _VIT,
    variant(
        _VIT,
        "deit",
        "DeiT",
        tower=replace(
            _VIT.tower,
            source="deit.modeling_deit:DeiTModel",
            prefixes=stripped("deit.", ""),
            ignored=("classifier.", "cls_classifier.", "distillation_classifier.", "pooler."),
        ),
        leading=2,  # class and distillation tokens
        processor="DeiT",
    ),
    variant(_VIT, "vit_msn", "ViT-MSN", "vit_msn.ViTMSNModel"),
    variant(
        _VIT,
        "ijepa",
        "I-JEPA",
        tower=replace(_VIT.tower, source="ijepa.modeling_ijepa:IJepaModel", prefixes=stripped("ijepa.", "")),
        leading=0,
        poolers=(MEAN,),
    ),
    variant(
        _VIT,
        "vit_mae",
        "ViT-MAE",
        tower=replace(_VIT.tower, source="vit_mae.modeling_vit_mae:ViTMAEModel", arguments=None, ignored=("decoder.",)),
        encoder=_mae,
    ),
)
