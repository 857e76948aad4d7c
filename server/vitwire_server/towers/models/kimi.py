"""Rows of Kimi's models, and what is particular about loading them: the layout that their authors publish."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from vitwire_server.core.grids import Footprint, Grid
from vitwire_server.towers.family import Family, Module, Parts, Weights, in_model, stripped
from vitwire_server.towers.layouts.packed import PackedFamily, frame_of
from vitwire_server.towers.layouts.patches import neighbours
from vitwire_server.towers.layouts.projected import ProjectedTower, of_clips
from vitwire_server.towers.metadata import Rows, Sources
from vitwire_server.towers.served import Served

_FUSED = ".attn.wqkv."


class KimiTower(ProjectedTower):
    """Attention over a whole chunk of a clip, whose frames are averaged; then the projector."""

    after = frozenset({"patches", "shares"})

    def __init__(self, family: PackedFamily, parts: Parts, config: Any) -> None:  # noqa: ANN401
        super().__init__(family, parts, config)
        self._chunk: int = self.model.config.pos_emb_time
        """Frames at most."""
        self.geometry = of_clips(self.geometry, most_frames=self._chunk, pooled=0)
        self._kinds |= {
            "frame_index": Rows((), torch.int64),
            "patches": Sources(self._chunk * self.geometry.merge**2),
            "shares": Rows((self._chunk,), torch.float32, per_token=True),
        }

    def footprint(self, grid: Grid) -> Footprint:
        """See Tower."""
        frame = grid.frame_patches // self.geometry.merge**2
        return super().footprint(grid)._replace(pooled=frame * (grid.t - 1))

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        """Chunks of fewer frames name their first one for those that they lack, with a share of 0."""
        patches = neighbours(grid, self.geometry.merge).unflatten(0, (grid.t, -1)).transpose(0, 1)
        lacking = patches[:, :1].expand(-1, self._chunk - grid.t, -1)
        shares = torch.zeros(len(patches), self._chunk)
        shares[:, : grid.t] = 1 / grid.t
        return super()._compute(grid) | {
            "frame_index": frame_of(grid) + int(grid.t > 1),
            "patches": torch.cat([patches, lacking], dim=1).flatten(1),
            "shares": shares,
        }

    def _shaped(self, pixels: Tensor) -> Tensor:
        side = self.geometry.patch
        return pixels.view(len(pixels), -1, side, side)

    def _given(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tower's own pooling takes clips of one length only: it gets a single token, which nobody uses."""
        return super()._given(tensors) | {"temporal_merge_index": tensors["patches"][:1, :, None]}

    def _finish(self, output: Any, tensors: Mapping[str, Tensor]) -> Tensor:  # noqa: ANN401
        hidden = output.last_hidden_state
        frames = tensors["patches"].unflatten(1, (self._chunk, -1)).unbind(1)
        shares = tensors["shares"].unbind(1)
        mean = sum(hidden[frame] * share[:, None, None] for frame, share in zip(frames, shares, strict=True))
        rows: Tensor = self.projector(mean.to(hidden.dtype)).squeeze(1)
        return rows


def _unfused(weights: Weights, config: Any) -> Weights:  # noqa: ANN401 - a configuration of transformers
    """One projection each for queries, keys and values, the rotary pairs of a head first halves, then second.

    The published weights rotate neighbouring columns, transformers those half a head apart.
    """
    apart: Weights = {}
    for name, tensor in weights.items():
        if _FUSED not in name:
            apart[name] = tensor
            continue
        queries, keys, values = tensor.chunk(3)
        for kind, own in (("q", queries), ("k", keys)):
            apart[name.replace(_FUSED, f".attn.{kind}_proj.")] = _halves(own, config.num_attention_heads)
        apart[name.replace(_FUSED, ".attn.v_proj.")] = values
    return apart


def _halves(rows: Tensor, heads: int) -> Tensor:
    """Rows (of each head) 0, 2, 4, ... and then 1, 3, 5, ..."""
    halves: Tensor = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return halves


@dataclass(frozen=True, kw_only=True)
class KimiVLFamily(PackedFamily):
    """Kimi-VL, which transformers has no classes for: its tower is that of Kimi K2.5 for single images."""

    def read_config(self, folder: Path, settings: Mapping[str, Any]) -> Any:  # noqa: ANN401
        """See Family. Raises KeyError, TypeError or ValueError where config.json is not of a model that is served."""
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
        return config_class(
            vision_config=vision,
            text_config=text,
            projection_hidden_size=own["hidden_size"],
            dtype=settings.get("torch_dtype") or settings.get("dtype"),
        )


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
    adapter=KimiTower,
    width="text_config.hidden_size",
    positions="patch_embed.pos_emb",
    layers="layers",
    whole_clips=True,
    raster=True,
    prepared=False,
    prepared_videos=False,
    architecture="27 x 1152, patch 14",
    pooled=True,
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
    adapter=KimiTower,
    width="text_config.hidden_size",
    positions="patch_embed.pos_emb",
    layers="layers",
    whole_clips=True,
    raster=True,
    prepared=False,
    videos=False,
    architecture="27 x 1152, patch 14",
    attention="full",
    special="MoonViT, through the classes of Kimi K2.5; projector",
)


ROWS: tuple[Family, ...] = (_KIMI_K25, _KIMI_VL)
