"""HyperCLOVA X (NAVER): Qwen2.5-VL's tower and a linear projector."""

from dataclasses import replace

from torch import nn

from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Family, Module, in_model
from vitwire_server.towers.layouts.heads import ProjectedTokens
from vitwire_server.towers.models.qwen import QWEN2_5_VL


class Projector(nn.Linear):
    """The projector, which transformers keeps as a bare layer of the whole model."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.vision_config.out_hidden_size, config.text_config.hidden_size)


_HYPERCLOVA = replace(
    QWEN2_5_VL,
    model_type="hyperclovax_vision_v2",
    title="HyperCLOVA X SEED Think",
    tower=replace(QWEN2_5_VL.tower, prefixes=in_model("vision_model.")),
    beside={
        "projector": Module(
            source=f"{__name__}:Projector", prefixes=in_model("projector.", "vision_projector."), config=""
        )
    },
    head=ProjectedTokens,
    width="text_config.hidden_size",
    transformers="5.23.0",
    special="projector",
)

ROWS: tuple[Family, ...] = (_HYPERCLOVA,)
