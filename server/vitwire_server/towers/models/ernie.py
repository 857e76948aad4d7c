"""ERNIE's vision towers (Baidu)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.core.models import Geometry
from vitwire_server.towers.family import Accepts, Family, Module, in_model
from vitwire_server.towers.layouts.heads import Head, Output, of_clips
from vitwire_server.towers.layouts.packed import PackedFamily
from vitwire_server.towers.metadata import Kind, Sources
from vitwire_server.towers.served import Served


class FramePairs(Head):
    """A resampler that makes one token of two frames; an image is its own second frame."""

    pools_frames = True

    def sizes(self, bare: Geometry) -> Geometry:
        return of_clips(bare, pooled=2)

    def inputs(self) -> dict[str, Kind]:
        return {"pairs": Sources(2, patches=self.geometry.merge**2)}

    def compute(self, grid: Grid) -> dict[str, Tensor]:
        frame = torch.arange(grid.frame_patches // self.geometry.merge**2)
        starts = torch.arange(grid.t).view(-1, 2) if grid.t > 1 else torch.zeros(1, 2, dtype=torch.int64)
        pairs = starts[:, None] * len(frame) + frame[:, None]
        return {"pairs": pairs.flatten(0, 1)}

    def rows(self, output: Output, tensors: Mapping[str, Tensor]) -> Tensor:
        resampler, hidden = self.projector, output.last_hidden_state
        tokens = resampler.spatial_linear(hidden.reshape(-1, self.geometry.merge**2 * hidden.shape[-1]))
        pairs = resampler.temporal_linear(tokens[tensors["pairs"]].flatten(1))
        rows: Tensor = resampler.after_norm(resampler.mlp(pairs))
        return rows


_ERNIE = PackedFamily(
    model_type="ernie4_5_vl_moe",
    title="ERNIE 4.5 VL",
    tower=Module(
        source="ernie4_5_vl_moe.modeling_ernie4_5_vl_moe:Ernie4_5_VLMoeVisionTransformerPretrainedModel",
        prefixes=in_model("vision_tower.", "vision_model."),
        served=(Served("temporal_merge_size", lambda frames, _: frames == 2, "2"),),
    ),
    beside={
        "projector": Module(
            source="ernie4_5_vl_moe.modeling_ernie4_5_vl_moe:Ernie4_5_VLMoeVariableResolutionResamplerModel",
            prefixes=in_model("resampler_model."),
            renames=(
                (r"_linear\.0\.", "_linear.fc1."),
                (r"_linear\.2\.", "_linear.fc2."),
                (r"_linear\.3\.", "_linear.ln."),
            ),
            config="",
        )
    },
    head=FramePairs,
    width="text_config.hidden_size",
    videos=Accepts.PIXELS,
    architecture="32 x 1280, patch 14",
    attention="per frame",
    special="a resampler makes one token of two frames; clips have an even number of frames",
)


ROWS: tuple[Family, ...] = (_ERNIE,)
