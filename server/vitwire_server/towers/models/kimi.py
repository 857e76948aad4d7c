"""Kimi K2.5, Kimi K3 and Kimi-VL (Moonshot AI), in the layout that their authors publish."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel

from vitwire_server.core.grids import Grid
from vitwire_server.core.models import Geometry
from vitwire_server.towers.configs import Config, Served, dtype_of, new_config, require
from vitwire_server.towers.family import Accepts, Parts, Weights, in_model, stripped
from vitwire_server.towers.layouts.heads import Head, Output, of_clips
from vitwire_server.towers.layouts.packed import AttentionSpan, Inputs, PackedFamily, frame_of
from vitwire_server.towers.layouts.patches import neighbours
from vitwire_server.towers.metadata import Kind, Rows, Sources
from vitwire_server.towers.shared.fused import halved, split_qkv
from vitwire_server.towers.shared.parts import projector, stock, variant

_FUSED = ".attn.wqkv."
_SAME = (
    "patch_size",
    "num_attention_heads",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "merge_kernel_size",
)
"""Fields that Kimi-VL's tower has by the same names, and Kimi K3's behind `vt_` in part."""
_EPSILON = torch.finfo(torch.float32).eps
"""What torch adds by default, whatever the dtype of rows; layers are fused if it is given."""
_K3: dict[str, object] = {
    **dict.fromkeys(("attn_bias", "linear_bias", "patch_embed_proj_bias"), False),
    "activation_func": "gelu_pytorch_tanh",
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "pos_emb_interpolation_mode": "bilinear",
}
"""Fields of Kimi K3's tower that have one value."""


def _unfused(weights: Weights, config: Config) -> Weights:
    """The published weights rotate neighbouring columns of a head, transformers those half a head apart."""
    return split_qkv(halved(_FUSED)(weights, config), _FUSED, ".attn.{}_proj.")


class FrameMeans(Head):
    """The frames of a clip, at most a chunk, are averaged before the projector."""

    pools_frames = True

    def __init__(self, parts: Parts, bare: Geometry) -> None:
        super().__init__(parts, bare)
        tower: Any = parts["tower"]
        tower.temporal_merge = lambda states, *_, **__: (
            states
        )  # since transformers 5.24 a method, which clips would sync

    def sizes(self, bare: Geometry) -> Geometry:
        return of_clips(bare, most_frames=self._chunk, pooled=0)

    @property
    def _chunk(self) -> int:
        return int(self.config.pos_emb_time)

    def inputs(self) -> dict[str, Kind]:
        return {
            "frame_index": Rows((), torch.int64),
            "patches": Sources(self._chunk * self.geometry.merge**2),
            "shares": Rows((self._chunk,), torch.float32, per="tokens"),
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
        """Before transformers 5.24, the stock pooling takes clips of one length only: it gets one token, unused."""
        return {"frame_index": tensors["frame_index"], "temporal_merge_index": tensors["patches"][:1, :, None]}

    def rows(self, output: Output, tensors: Mapping[str, Tensor]) -> Tensor:
        hidden = output.last_hidden_state
        frames = tensors["patches"].unflatten(1, (self._chunk, -1)).unbind(1)
        shares = tensors["shares"].unbind(1)
        mean: Any = sum(hidden[frame] * share[:, None, None] for frame, share in zip(frames, shares, strict=True))
        rows: Tensor = self.projector(mean.to(hidden.dtype)).squeeze(1)
        return rows


class KimiK3Vision(Kimi_K25VisionModel):
    """Kimi K2.5's without biases, with RMS norms, and with heads of any size."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)  # type: ignore[arg-type]
        width, inner = config.hidden_size, config.head_dim * config.num_attention_heads
        self.patch_embed.proj.bias, self.patch_embed.pos_emb.interpolation_mode = None, "bilinear"
        self.final_layernorm: Any = nn.RMSNorm(width, eps=_EPSILON)
        layers: Any = self.layers
        for layer in layers:
            layer.norm1, layer.norm2 = nn.RMSNorm(width, eps=_EPSILON), nn.RMSNorm(width, eps=_EPSILON)
            layer.mlp.fc1.bias = layer.mlp.fc2.bias = None
            own = layer.attn
            own.head_dim, own.scaling = config.head_dim, config.head_dim**-0.5
            own.q_proj, own.k_proj, own.v_proj = (nn.Linear(width, inner, bias=False) for _ in "qkv")
            own.proj = nn.Linear(inner, width, bias=False)


class KimiK3Projector(nn.Sequential):
    """The patches of a token side by side, through an MLP and an RMS norm."""

    def __init__(self, config: Config) -> None:
        vision, width = config.vision_config, config.text_config.hidden_size
        inner = vision.hidden_size * vision.merge_kernel_size[0] ** 2
        first, last = nn.Linear(inner, inner, bias=False), nn.Linear(inner, width, bias=False)
        norm = nn.RMSNorm(width, eps=config.projection_layer_norm_eps)
        super().__init__(nn.Flatten(), first, nn.GELU(), last, norm)


def _kimi_config(_: Path, settings: Mapping[str, Any]) -> Config:
    """Kimi-VL's or Kimi K3's, which transformers has no classes for: Kimi K2.5's, for single images."""
    own = settings["vision_config"]
    fields = {name: own[name] if name in own else own[f"vt_{name}"] for name in _SAME}
    if settings["model_type"] == "kimi_k3":
        for name, value in _K3.items():
            require(f"vision_config.{name}", own.get(name, value), value)
        fields["head_dim"] = own["qkv_hidden_size"] // fields["num_attention_heads"]
    side = own["init_pos_emb_height"]
    require("vision_config.init_pos_emb_width", own["init_pos_emb_width"], side, field="init_pos_emb_height")
    return new_config(
        "kimi_k25",
        vision_config={**fields, "pos_emb_height": side, "pos_emb_width": side, "pos_emb_time": 1},
        text_config={"model_type": "deepseek_v3", "hidden_size": settings["text_config"]["hidden_size"]},
        projection_hidden_size=fields["hidden_size"],
        projection_layer_norm_eps=own.get("projector_ln_eps", 1e-5),
        dtype=dtype_of(settings),
    )


_KIMI_K25 = PackedFamily(
    "kimi_k25",
    "Kimi K2.5, K2.6",
    tower=stock(
        "kimi_k25.Kimi_K25VisionModel",
        in_model("vision_tower."),
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
    ),
    beside=projector(
        "kimi_k25.Kimi_K25MultimodalProjection",
        in_model("mm_projector."),
        renames=((r"^proj\.0\.", "in_proj."), (r"^proj\.2\.", "out_proj.")),
    ),
    head=FrameMeans,
    layers="layers",
    span=AttentionSpan.CLIP,
    inputs=Inputs(
        learned_positions="patch_embed.pos_emb",
        raster=True,
        shape=lambda rows, side: rows.view(len(rows), -1, side, side),
    ),
    images=Accepts.PIXELS,
    videos=Accepts.PIXELS,
)

ROWS = (
    _KIMI_K25,
    variant(
        _KIMI_K25,
        "kimi_vl",
        "Kimi-VL",
        configuration=_kimi_config,
        beside=projector(
            "kimi_k25.Kimi_K25MultimodalProjection",
            stripped("multi_modal_projector."),
            renames=((r"^linear_1\.", "in_proj."), (r"^linear_2\.", "out_proj.")),
        ),
        videos=Accepts.NOTHING,
    ),
    variant(
        _KIMI_K25,
        "kimi_k3",
        "Kimi K3",
        source=KimiK3Vision,
        configuration=_kimi_config,
        beside=projector(
            KimiK3Projector,
            {"mm_projector.proj.0.": "1.", "mm_projector.proj.2.": "3.", "mm_projector.post_norm.": "4."},
        ),
        videos=Accepts.NOTHING,
    ),
)
