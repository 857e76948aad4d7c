"""Hunyuan-VL, HunyuanOCR and Hy4 (Tencent)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vitwire_server.core.grids import Grid
from vitwire_server.core.models import Geometry, Preprocessing
from vitwire_server.towers.configs import Config, dtype_of, new_config, one_of
from vitwire_server.towers.family import in_model
from vitwire_server.towers.layouts.patches import neighbours, taps
from vitwire_server.towers.layouts.raster import RasterFamily, RasterTower
from vitwire_server.towers.metadata import Kind, Rows, Sources
from vitwire_server.towers.processors.settings import BICUBIC, CLIP, AreaRule, areas, bounded, images
from vitwire_server.towers.shared.learned import TAPPED
from vitwire_server.towers.shared.parts import stock, variant

_HY4_DEFAULTS = {"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 40, "out_hidden_size": 6144}
NAMES = (
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.fc1."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.fc2."),
    (r"\.input_layernorm\.", ".layer_norm1."),
    (r"\.post_attention_layernorm\.", ".layer_norm2."),
    (r"^perceive\.proj\.0\.", "patch_merger.proj_conv."),
    (r"^perceive\.proj\.2\.", "patch_merger.proj_out."),
    (r"^perceive\.norm\.", "patch_merger.before_rms."),
    (r"^perceive\.", "patch_merger."),
)
"""Names in checkpoints, and in transformers."""


def _hunyuan_settings(image: Mapping[str, Any], _: Config) -> Preprocessing:
    """Its processor resizes bicubically, whatever its files say."""
    return bounded({**image, "resample": BICUBIC}, areas(image, AreaRule((512 * 512, 2048 * 2048))), CLIP)


class HunyuanTower(RasterTower):
    """Learned positions, resampled to each grid; squares of patches become tokens.

    The rows that the stock merger puts before, between and behind the lines of an image are left out.
    """

    def _inputs(self) -> dict[str, Kind]:
        return {**TAPPED, "neighbours": Sources(self.geometry.merge**2)}

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        indices, weights = taps(grid.h, grid.w, self.model.embeddings.position_edge)
        return {
            **super()._compute(grid),
            "interp_indices": indices + 1,  # before the patches' positions is one of a class token that no image has
            "interp_weights": weights,
            "neighbours": neighbours(grid, self.geometry.merge),
        }

    def _rows(self, pixels: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        model, embeddings, side = self.model, self.model.embeddings, self.geometry.patch
        patches = embeddings.patch_embedding(pixels.view(len(pixels), -1, side, side)).flatten(1)
        taken = embeddings.position_embedding(tensors["interp_indices"]).float()
        learned = (taken * tensors["interp_weights"][:, :, None]).sum(1)
        states = (patches + learned.to(patches.dtype)).unsqueeze(0)
        boundaries, longest = tensors["cu_seqlens"], attended["max_length_q"]
        for layer in model.layers:
            states = layer(states, attention_mask=None, cu_seqlens=boundaries, max_seqlen=longest)
        merger, merge = model.patch_merger, self.geometry.merge
        squares = merger.before_rms(states[0])[tensors["neighbours"]].transpose(1, 2).unflatten(2, (merge, merge))
        tokens = merger.proj_out(merger.proj_act(merger.proj_conv(squares))).flatten(1)
        return merger.after_rms(merger.mlp(tokens))  # type: ignore[no-any-return]


class Hy4Tower(HunyuanTower):
    """Positions on a grid that is a tenth of a patch larger than the image, and a row behind each line of tokens."""

    def _geometry(self, config: Config) -> Geometry:
        return replace(super()._geometry(config), line_ends=True)

    def _inputs(self) -> dict[str, Kind]:
        return {**super()._inputs(), "ends": Rows((1,), torch.bool, per="tokens")}

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        """Positions as in HYV4VLVisionPatchEmbed of transformers 5.24. Ends of lines are merged of any patches."""
        side, columns = self.model.embeddings.position_edge, grid.w // self.geometry.merge
        (down, above), (across, left) = (
            functional.interpolate(torch.eye(side)[None], scale_factor=(n + 0.1) / side, mode="linear")[0].T.topk(2)
            for n in (grid.h, grid.w)
        )
        computed = super()._compute(grid)
        lines = computed["neighbours"].unflatten(0, (-1, columns))
        return {
            **computed,
            "interp_indices": (1 + above[:, None, :, None] * side + left[:, None]).view(-1, 4),
            "interp_weights": (down[:, None, :, None] * across[:, None]).view(-1, 4),
            "neighbours": functional.pad(lines, (0, 0, 0, 1)).flatten(0, 1),
            "ends": (torch.arange(columns + 1) == columns).repeat(len(lines))[:, None],
        }

    def _rows(self, pixels: Tensor, tensors: Mapping[str, Tensor], attended: Mapping[str, Any]) -> Tensor:
        rows = super()._rows(pixels, tensors, attended)
        return torch.where(tensors["ends"], self.model.patch_merger.image_newline, rows)


_HUNYUAN = RasterFamily(
    "hunyuan_vl",
    "HunyuanOCR",
    tower=stock(
        "hunyuan_vl.HunYuanVLVisionTransformer",
        in_model("vision_tower.", "vit."),
        renames=NAMES,
        served=(one_of("interpolate_mode", "bilinear"),),
    ),
    width="vision_config.text_hidden_size",
    forward=HunyuanTower,
    merge="vision_config.spatial_merge_size",
    layers="layers",
    processor=images(_hunyuan_settings),
    transformers="5.23.0",
)

ROWS = (
    _HUNYUAN,
    variant(
        _HUNYUAN,
        "hy_v4_vl",
        "Hy4",
        "vitwire_server.towers.models.subclasses:Hy4",
        configuration=lambda _, settings: new_config(  # transformers has its classes since 5.24 only
            "hunyuan_vl",
            vision_config={**_HY4_DEFAULTS, **settings["vision_config"], "model_type": "hunyuan_vl_vision"},
            dtype=dtype_of(settings),
        ),
        width="vision_config.out_hidden_size",
        forward=Hy4Tower,
    ),
)
