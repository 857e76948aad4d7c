"""DINOv2 and DINOv3 (Meta), and TIPSv2 (Google), whose tower is DINOv2's with registers."""

import torch
from torch import Tensor

from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Parts, Weights, stripped
from vitwire_server.towers.layouts.plain import PlainEncoder, PlainFamily
from vitwire_server.towers.shared.fused import split_qkv
from vitwire_server.towers.shared.learned import fix_positions
from vitwire_server.towers.shared.parts import Constants, part, stock, variant
from vitwire_server.towers.shared.pooling import MEAN, class_token

_STORED_NAMES = (
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
)
"""Checkpoints have these names; adapters may have those of newer modules."""


def _with_registers(config: Config) -> int:
    """The class token and the register tokens."""
    return 1 + int(config.num_register_tokens)


class Dinov2(PlainEncoder):
    """Learned positions, resampled once to the processor's tile, square or not."""

    @torch.no_grad()
    def __init__(self, family: PlainFamily, parts: Parts, config: Config) -> None:
        super().__init__(family, parts, config)
        embeddings = self._tower.embeddings
        stand_in = embeddings.position_embeddings.new_zeros(1, 1 + self.tile.tokens, self.width)
        resampled = embeddings.interpolate_pos_encoding(stand_in, self.tile.height, self.tile.width)
        fix_positions(embeddings, resampled, "position_embeddings", "interpolate_pos_encoding")


class Dinov3(PlainEncoder):
    """Rotary positions of the processor's tile, computed once: the stock forward looks them up in a cache."""

    @torch.no_grad()
    def __init__(self, family: PlainFamily, parts: Parts, config: Config) -> None:
        super().__init__(family, parts, config)
        tile = torch.zeros(1, self.channels, self.tile.height, self.tile.width, device=self._tower.device)
        cosines, sines = self._tower.rope_embeddings(tile)
        self._rotary = Constants(cosines=cosines.clone(), sines=sines.clone())
        self.model["rotary"] = self._rotary

    def tokens(self, tiles: Tensor) -> Tensor:
        tower, states = self._tower, self._tower.embeddings(tiles)
        rotary = (self._rotary.cosines.to(states.dtype), self._rotary.sines.to(states.dtype))
        return tower.norm(tower.model(states, position_embeddings=rotary).last_hidden_state)  # type: ignore[no-any-return]


_DINOV2 = PlainFamily(
    "dinov2",
    "DINOv2",
    tower=part("dinov2.Dinov2Model", stripped("dinov2.", ""), renames=_STORED_NAMES, ignored=("classifier.",)),
    encoder=Dinov2,
    layers="encoder.layer",
    resizes=True,
    poolers=(class_token(), MEAN),
    processor="Bit",
)

_DINOV2_WITH_REGISTERS = variant(
    _DINOV2,
    "dinov2_with_registers",
    "DINOv2 with registers",
    tower=part(
        "dinov2_with_registers.Dinov2WithRegistersModel",
        stripped("dinov2_with_registers.", ""),
        renames=_STORED_NAMES,
        ignored=("classifier.",),
    ),
    leading=_with_registers,
)


def _unfused(weights: Weights, _: Config) -> Weights:
    """Query, key and value apart, and the two halves of a gated MLP, as transformers holds them."""
    split: Weights = {}
    for name, own in split_qkv(weights, ".attn.qkv.", ".attention.{}_proj.").items():
        if ".mlp.w12." in name:
            halves = zip(("gate_proj", "up_proj"), own.chunk(2), strict=True)
            split |= {name.replace("w12", part): half for part, half in halves}
        else:
            split[name] = own
    return split


ROWS = (
    _DINOV2,
    _DINOV2_WITH_REGISTERS,
    variant(
        _DINOV2,
        "dinov3_vit",
        "DINOv3",
        tower=part("dinov3_vit.DINOv3ViTModel", stripped(""), renames=((r"^model\.layer\.", "layer."),)),
        encoder=Dinov3,
        layers="model.layer",
        leading=_with_registers,
        processor="DINOv3ViT",
    ),
    variant(
        _DINOV2_WITH_REGISTERS,
        "tipsv2",
        "TIPSv2",
        tower=stock(
            "tipsv2.Tipsv2VisionModel",
            stripped("vision_encoder.", "vision_model."),
            renames=(
                (r"^patch_embed\.proj\.", "embeddings.patch_embeddings.projection."),
                (r"^(cls_token|mask_token|register_tokens)$", r"embeddings.\1"),
                (r"^pos_embed$", "embeddings.position_embeddings"),
                (r"^norm\.", "layernorm."),
                (r"^blocks\.", "encoder.layer."),
                (r"\.attn\.proj\.", ".attention.o_proj."),
                (r"\.ls([12])\.gamma$", r".layer_scale\1.lambda1"),
                (r"\.mlp\.c_fc\.", ".mlp.fc1."),
                (r"\.mlp\.c_proj\.", ".mlp.fc2."),
                (r"\.mlp\.w3\.", ".mlp.down_proj."),
            ),
            convert=_unfused,
        ),
        processor="Tipsv2",
        transformers="5.23.0",
    ),
)
