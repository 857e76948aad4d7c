"""Hunyuan-VL and HunyuanOCR (Tencent)."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.core.models import Preprocessing
from vitwire_server.towers.configs import Config, one_of
from vitwire_server.towers.family import in_model
from vitwire_server.towers.layouts.patches import neighbours, taps
from vitwire_server.towers.layouts.raster import RasterFamily, RasterTower
from vitwire_server.towers.metadata import Kind, Sources
from vitwire_server.towers.processors.settings import BICUBIC, CLIP, bounded, images
from vitwire_server.towers.shared.learned import TAPPED
from vitwire_server.towers.shared.parts import stock

_HUNYUAN_AREAS = (512 * 512, 2048 * 2048)


def _hunyuan_settings(image: Mapping[str, Any], _: Config) -> Preprocessing:
    """Its processor resizes bicubically, whatever its files say."""
    size = image.get("size") or {}
    smallest = int(image.get("min_pixels") or size.get("shortest_edge", _HUNYUAN_AREAS[0]))
    largest = int(image.get("max_pixels") or size.get("longest_edge", _HUNYUAN_AREAS[1]))
    return bounded({**image, "resample": BICUBIC}, (smallest, largest), CLIP)


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


ROWS = (
    RasterFamily(
        "hunyuan_vl",
        "HunyuanOCR",
        tower=stock(
            "hunyuan_vl.HunYuanVLVisionTransformer",
            in_model("vision_tower.", "vit."),
            renames=(
                (r"\.mlp\.dense_h_to_4h\.", ".mlp.fc1."),
                (r"\.mlp\.dense_4h_to_h\.", ".mlp.fc2."),
                (r"\.input_layernorm\.", ".layer_norm1."),
                (r"\.post_attention_layernorm\.", ".layer_norm2."),
                (r"^perceive\.proj\.0\.", "patch_merger.proj_conv."),
                (r"^perceive\.proj\.2\.", "patch_merger.proj_out."),
                (r"^perceive\.", "patch_merger."),
            ),
            served=(one_of("interpolate_mode", "bilinear"),),
        ),
        width="vision_config.text_hidden_size",
        forward=HunyuanTower,
        merge="vision_config.spatial_merge_size",
        layers="layers",
        processor=images(_hunyuan_settings),
        transformers="5.23.0",
    ),
)
