"""Kimi K2.5 and Kimi-VL (Moonshot AI), in the layout that their authors publish."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from vitwire_server.core.grids import Grid
from vitwire_server.core.models import Geometry
from vitwire_server.towers.configs import Config, dtype_of
from vitwire_server.towers.family import Accepts, Family, Module, Weights, in_model, stripped
from vitwire_server.towers.layouts.heads import Head, Output, of_clips
from vitwire_server.towers.layouts.packed import AttentionSpan, Inputs, PackedFamily, frame_of
from vitwire_server.towers.layouts.patches import neighbours
from vitwire_server.towers.metadata import Kind, Rows, Sources
from vitwire_server.towers.served import Served
from vitwire_server.towers.shared.fused import rotary_halves

_FUSED = ".attn.wqkv."


def _unfused(weights: Weights, config: Config) -> Weights:
    """Separate projections for queries, keys and values; of each head, the first columns of rotary pairs come first.

    The published weights rotate neighbouring columns, transformers those half a head apart.
    """
    apart: Weights = {}
    for name, tensor in weights.items():
        if _FUSED not in name:
            apart[name] = tensor
            continue
        queries, keys, values = tensor.chunk(3)
        for kind, own in (("q", queries), ("k", keys)):
            apart[name.replace(_FUSED, f".attn.{kind}_proj.")] = rotary_halves(own, config.num_attention_heads)
        apart[name.replace(_FUSED, ".attn.v_proj.")] = values
    return apart


def squares(rows: Tensor, side: int) -> Tensor:
    """Rows of pixels as `(patches, C, p, p)`."""
    return rows.view(len(rows), -1, side, side)


class FrameMeans(Head):
    """Frames of a clip, at most those of a chunk, are averaged before the projector."""

    pools_frames = True

    def sizes(self, bare: Geometry) -> Geometry:
        return of_clips(bare, most_frames=self._chunk, pooled=0)

    @property
    def _chunk(self) -> int:
        """Frames of a chunk."""
        frames: int = self.config.pos_emb_time
        return frames

    def inputs(self) -> dict[str, Kind]:
        return {
            "frame_index": Rows((), torch.int64),
            "patches": Sources(self._chunk * self.geometry.merge**2),
            "shares": Rows((self._chunk,), torch.float32, per_token=True),
        }

    def compute(self, grid: Grid) -> dict[str, Tensor]:
        """Clips of fewer frames than a chunk repeat their first one with a share of 0."""
        patches = neighbours(grid, self.geometry.merge).unflatten(0, (grid.t, -1)).transpose(0, 1)
        lacking = patches[:, :1].expand(-1, self._chunk - grid.t, -1)
        shares = torch.zeros(len(patches), self._chunk)
        shares[:, : grid.t] = 1 / grid.t
        return {
            "frame_index": frame_of(grid) + int(grid.t > 1),
            "patches": torch.cat([patches, lacking], dim=1).flatten(1),
            "shares": shares,
        }

    def keywords(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tower's own pooling takes clips of one length only: it gets a single token, whose result is not used."""
        return {"frame_index": tensors["frame_index"], "temporal_merge_index": tensors["patches"][:1, :, None]}

    def rows(self, output: Output, tensors: Mapping[str, Tensor]) -> Tensor:
        hidden = output.last_hidden_state
        frames = tensors["patches"].unflatten(1, (self._chunk, -1)).unbind(1)
        shares = tensors["shares"].unbind(1)
        mean: Any = sum(hidden[frame] * share[:, None, None] for frame, share in zip(frames, shares, strict=True))
        rows: Tensor = self.projector(mean.to(hidden.dtype)).squeeze(1)
        return rows


@dataclass(frozen=True, kw_only=True)
class KimiVLFamily(PackedFamily):
    """Kimi-VL, which transformers has no classes for: its tower is Kimi K2.5's, for single images."""

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Config:
        """See Family. Raises KeyError, TypeError or ValueError if config.json is not of a model that is served."""
        del folder
        own = settings["vision_config"]
        height, width = own["init_pos_emb_height"], own["init_pos_emb_width"]
        if height != width:
            raise ValueError(f"vision_config.init_pos_emb_width is {width}, but must be init_pos_emb_height, {height}")
        vision = {
            "patch_size": own["patch_size"],
            "pos_emb_height": height,
            "pos_emb_width": width,
            "pos_emb_time": 1,
            "num_attention_heads": own["num_attention_heads"],
            "num_hidden_layers": own["num_hidden_layers"],
            "hidden_size": own["hidden_size"],
            "intermediate_size": own["intermediate_size"],
            "merge_kernel_size": own["merge_kernel_size"],
        }
        text = {"model_type": "deepseek_v3", "hidden_size": settings["text_config"]["hidden_size"]}
        config_class: Any = CONFIG_MAPPING["kimi_k25"]
        config: Config = config_class(
            vision_config=vision,
            text_config=text,
            projection_hidden_size=own["hidden_size"],
            dtype=dtype_of(settings),
        )
        return config


_KIMI_TOWER = Module(
    source="kimi_k25.modeling_kimi_k25:Kimi_K25VisionModel",
    prefixes=in_model("vision_tower."),
    renames=(
        (r"^encoder\.blocks\.(\d+)\.mlp\.fc1\.", r"layers.\1.mlp.fc2."),
        (r"^encoder\.blocks\.(\d+)\.mlp\.fc0\.", r"layers.\1.mlp.fc1."),
        (r"^encoder\.blocks\.(\d+)\.norm1\.", r"layers.\1.norm2."),
        (r"^encoder\.blocks\.(\d+)\.norm0\.", r"layers.\1.norm1."),
        (r"^encoder\.blocks\.(\d+)\.wo\.", r"layers.\1.attn.proj."),
        (r"^encoder\.blocks\.(\d+)\.wqkv\.", r"layers.\1.attn.wqkv."),
        (r"^encoder\.", ""),
        (r"^patch_embed\.pos_emb\.weight$", "patch_embed.pos_emb.position_embeddings"),
    ),
    ignored=("patch_embed.pos_emb.time_",),
    convert=_unfused,
    served=(
        Served("merge_kernel_size", lambda sides, _: sides[0] == sides[1], "two equal sides"),
        Served(
            "pos_emb_width",
            lambda width, vision: width == vision.pos_emb_height,
            "equal to the height of the table of positions",
        ),
    ),
)


_KIMI_INPUTS = Inputs(learned_positions="patch_embed.pos_emb", raster=True, shape=squares)

_KIMI_K25 = PackedFamily(
    model_type="kimi_k25",
    title="Kimi K2.5, K2.6",
    tower=_KIMI_TOWER,
    beside={
        "projector": Module(
            source="kimi_k25.modeling_kimi_k25:Kimi_K25MultimodalProjection",
            prefixes=in_model("mm_projector."),
            renames=((r"^proj\.0\.", "in_proj."), (r"^proj\.2\.", "out_proj.")),
            config="",
        )
    },
    head=FrameMeans,
    width="text_config.hidden_size",
    layers="layers",
    span=AttentionSpan.CLIP,
    inputs=_KIMI_INPUTS,
    images=Accepts.PIXELS,
    videos=Accepts.PIXELS,
    architecture="27 x 1152, patch 14",
    attention="over a chunk of up to 4 frames",
    special="frames of a chunk are averaged, so a chunk has the tokens of one frame; projector",
)


_KIMI_VL = KimiVLFamily(
    model_type="kimi_vl",
    title="Kimi-VL",
    tower=_KIMI_TOWER,
    beside={
        "projector": Module(
            source="kimi_k25.modeling_kimi_k25:Kimi_K25MultimodalProjection",
            prefixes=stripped("multi_modal_projector."),
            renames=((r"^linear_1\.", "in_proj."), (r"^linear_2\.", "out_proj.")),
            config="",
        )
    },
    head=FrameMeans,
    width="text_config.hidden_size",
    layers="layers",
    span=AttentionSpan.CLIP,
    inputs=_KIMI_INPUTS,
    images=Accepts.PIXELS,
    videos=Accepts.NOTHING,
    architecture="27 x 1152, patch 14",
    attention="full",
    special="MoonViT, through the classes of Kimi K2.5; projector",
)


ROWS: tuple[Family, ...] = (_KIMI_K25, _KIMI_VL)
