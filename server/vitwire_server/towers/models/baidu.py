"""ERNIE's and PaddleOCR-VL's vision towers (Baidu), and Keye-VL's (Kuaishou), which the latter's was made of."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.core.models import Geometry, Resizing
from vitwire_server.towers.configs import Config, changed, dtype_of, new_config, one_of, usual_fields
from vitwire_server.towers.family import Accepts, in_model, stripped
from vitwire_server.towers.layouts.heads import Head, Output, of_clips
from vitwire_server.towers.layouts.packed import AttentionSpan, Inputs, PackedFamily
from vitwire_server.towers.layouts.patches import neighbours
from vitwire_server.towers.metadata import Kind, Sources
from vitwire_server.towers.processors.settings import AreaRule
from vitwire_server.towers.shared.parts import projector, stock, variant


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


class PatchProjector(Head):
    """A projector that normalises patches, which lie in raster order, and groups them to tokens."""

    def inputs(self) -> dict[str, Kind]:
        return {"patches": Sources(self.geometry.merge**2)}

    def compute(self, grid: Grid) -> dict[str, Tensor]:
        return {"patches": neighbours(grid, self.geometry.merge)}

    def rows(self, output: Output, tensors: Mapping[str, Tensor]) -> Tensor:
        projector = self.projector
        patches = projector.pre_norm(output.last_hidden_state)[tensors["patches"]]
        rows: Tensor = projector.linear_2(projector.act(projector.linear_1(patches.flatten(1))))
        return rows


class TokenProjector(PatchProjector):
    """A projector that groups patches first, and normalises tokens."""

    def rows(self, output: Output, tensors: Mapping[str, Tensor]) -> Tensor:
        tokens = self.projector.pre_norm(output.last_hidden_state[tensors["patches"]].flatten(1))
        rows: Tensor = self.projector.linear_2(self.projector.act(self.projector.linear_1(tokens)))
        return rows


def same_tower(vision: Mapping[str, Any], settings: Mapping[str, Any]) -> Config:
    """PaddleOCR-VL's configuration with this tower, and rows for the language model of another maker's config.json."""
    width = (settings.get("text_config") or settings.get("llm_config") or settings)["hidden_size"]
    own = usual_fields(vision, "hidden_act", "layer_norm_eps", "num_channels", "spatial_merge_size")
    return new_config("paddleocr_vl", vision_config=own, text_config={"hidden_size": width}, dtype=dtype_of(settings))


def _whole_tokens(config: Config) -> tuple[Config]:
    """The configuration of a projector of tokens, each as if it were one patch."""
    columns = config.vision_config.hidden_size * config.vision_config.spatial_merge_size**2
    return (changed(config, {"vision_config.hidden_size": columns, "vision_config.spatial_merge_size": 1}),)


PADDLEOCR_VL = PackedFamily(
    "paddleocr_vl",
    "PaddleOCR-VL",
    tower=stock(
        "paddleocr_vl.PaddleOCRVisionModel",
        in_model("visual."),
        ignored=("vision_model.head.", "vision_model.embeddings.packing_position_embedding."),
    ),
    beside=projector("paddleocr_vl.PaddleOCRProjector", stripped("model.projector.", "mlp_AR.")),
    head=PatchProjector,
    inputs=Inputs(
        learned_positions="vision_model.embeddings",
        raster=True,
        shape=lambda rows, side: rows.view(1, len(rows), -1, side, side),
    ),
    layers="vision_model.encoder.layers",
    image_areas=AreaRule(resizing=Resizing.ENLARGED_AREA),
    videos=Accepts.NOTHING,
    transformers="5.23.0",
)

_KEYE = variant(
    PADDLEOCR_VL,
    "Keye",
    "Keye-VL",
    configuration=lambda _, settings: same_tower(settings["vision_config"], settings),
    span=AttentionSpan.CLIP,
    videos=Accepts.PIXELS,
)

ROWS = (
    PackedFamily(
        "ernie4_5_vl_moe",
        "ERNIE 4.5 VL",
        tower=stock(
            "ernie4_5_vl_moe.Ernie4_5_VLMoeVisionTransformerPretrainedModel",
            in_model("vision_tower.", "vision_model."),
            served=(one_of("temporal_merge_size", 2),),
        ),
        beside=projector(
            "ernie4_5_vl_moe.Ernie4_5_VLMoeVariableResolutionResamplerModel",
            in_model("resampler_model."),
            renames=(
                (r"_linear\.0\.", "_linear.fc1."),
                (r"_linear\.2\.", "_linear.fc2."),
                (r"_linear\.3\.", "_linear.ln."),
            ),
        ),
        head=FramePairs,
        videos=Accepts.PIXELS,
    ),
    PADDLEOCR_VL,
    _KEYE,
    variant(
        _KEYE,
        "KeyeVL1_5",
        "Keye-VL 1.5",
        beside={"projector": replace(PADDLEOCR_VL.modules["projector"], arguments=_whole_tokens)},
        head=TokenProjector,
        span=AttentionSpan.FRAME,
    ),
)
