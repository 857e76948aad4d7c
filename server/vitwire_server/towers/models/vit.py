"""ViT (Google), and towers of its form: DeiT, ViT-MSN, I-JEPA and the encoder of ViT-MAE (Meta)."""

from dataclasses import replace
from types import MethodType

from torch import Tensor

from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Family, Module, Parts, stripped
from vitwire_server.towers.layouts.plain import PlainEncoder, PlainFamily, no_leading_tokens
from vitwire_server.towers.shared.pooling import MEAN, class_token


class Mae(PlainEncoder):
    """All patches in their order, of which the stock forward masks some."""

    def __init__(self, family: PlainFamily, parts: Parts, config: Config) -> None:
        super().__init__(family, parts, config)
        embeddings = self._tower.embeddings
        embeddings.random_masking = MethodType(_unmasked, embeddings)


def _unmasked(embeddings: object, patches: Tensor, noise: None) -> tuple[Tensor, None, None]:
    """In place of the stock function: all patches, no mask, and no order to restore."""
    del embeddings, noise
    return patches, None, None


_VIT = PlainFamily(
    model_type="vit",
    title="ViT",
    architecture="12 x 768, 24 x 1024 or 32 x 1280, patch 14, 16 or 32",
    tower=Module(
        source="vitwire_server.towers.models.vit_tower:Vit",
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

_DEIT = replace(
    _VIT,
    model_type="deit",
    title="DeiT",
    architecture="12 x 192, 12 x 384 or 12 x 768, patch 16",
    tower=replace(
        _VIT.tower,
        source="vitwire_server.towers.models.vit_tower:Deit",
        prefixes=stripped("deit.", ""),
        ignored=("classifier.", "cls_classifier.", "distillation_classifier.", "pooler."),
    ),
    leading=lambda _: 2,
    processor="DeiT",
    special="class and distillation tokens; rows of the patches, after the last norm",
)

_VIT_MSN = replace(
    _VIT,
    model_type="vit_msn",
    title="ViT-MSN",
    architecture="12 x 384, 12 x 768 or 24 x 1024, patch 4, 7 or 16",
    tower=replace(_VIT.tower, source="vit_msn.modeling_vit_msn:ViTMSNModel"),
)

_IJEPA = replace(
    _VIT,
    model_type="ijepa",
    title="I-JEPA",
    architecture="32 x 1280 or 40 x 1408, patch 14 or 16",
    tower=replace(_VIT.tower, source="ijepa.modeling_ijepa:IJepaModel", prefixes=stripped("ijepa.", "")),
    leading=no_leading_tokens,
    poolers=(MEAN,),
)

_VIT_MAE = replace(
    _VIT,
    model_type="vit_mae",
    title="ViT-MAE",
    architecture="12 x 768, 24 x 1024 or 32 x 1280, patch 14 or 16",
    tower=replace(_VIT.tower, source="vit_mae.modeling_vit_mae:ViTMAEModel", ignored=("decoder.",)),
    encoder=Mae,
    special="the encoder, without masking; rows of the patches, after the last norm",
)

ROWS: tuple[Family, ...] = (_VIT, _DEIT, _VIT_MSN, _IJEPA, _VIT_MAE)
