"""Cosmos 3 (NVIDIA): the reasoner's tower is Qwen3-VL's, that of Edge a SigLIP 2 for packed patches."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitwire_server.core.grids import Grid
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Parts, in_model
from vitwire_server.towers.layouts.packed import PackedFamily, PackedTower
from vitwire_server.towers.metadata import Kind, Rows
from vitwire_server.towers.models.qwen import QWEN3_VL
from vitwire_server.towers.processors.areas import AreaRule
from vitwire_server.towers.shared.parts import projector, stock, variant
from vitwire_server.towers.tower import Metadata

_UNIFIED = ("blocks.", "merger.", "patch_embed.", "pos_embed.", "deepstack_merger_list.")
"""Beginnings of the tower's weights where a checkpoint holds them beside a generator's, without a prefix."""
_RENAMED = (
    (r"\.mlp\.up_proj\.", ".mlp.fc1."),
    (r"\.mlp\.down_proj\.", ".mlp.fc2."),
    (r"\.self_attn\.to_([qkv])\.", r".self_attn.\1_proj."),
)
"""Names that transformers writes for Edge's tower, as the published ones of its language model, and those it reads."""


class EdgeTower(PackedTower):
    """Learned positions, resampled to each grid on the host, as antialiasing has no taps; patches are `(p, p, C)`."""

    def __init__(self, family: PackedFamily, parts: Parts, config: Config) -> None:
        super().__init__(family, parts, config)
        self.geometry = replace(self.geometry, channels_last=True)
        self._table = self.model.embeddings.position_embedding.weight.detach().cpu()

    def _inputs(self) -> dict[str, Kind]:
        return {"positions": Rows((self._table.shape[1],), self._table.dtype)}

    def _compute(self, grid: Grid) -> dict[str, Tensor]:
        embeddings = self.model.embeddings
        side = embeddings.position_embedding_size
        table, grids = self._table.view(side, side, -1), torch.tensor([grid])
        positions = embeddings.resize_positional_embeddings(table, grids, self.geometry.merge)
        return {**self._ends(grid), "positions": positions}

    def forward(self, pixels: Tensor, metadata: Metadata) -> Tensor:
        """See PackedTower."""
        model, tensors = self.model, metadata.tensors
        states = model.embeddings.patch_embedding(pixels) + tensors["positions"]
        states = model.encoder(states, None, cu_seqlens=tensors["cu_seqlens"], **metadata.bounds)
        rows: Tensor = self.head.projector(model.post_layernorm(states))
        return rows


@dataclass(frozen=True, kw_only=True)
class EdgeFamily(PackedFamily):
    """Cosmos 3 Edge."""

    def build(self, parts: Parts, config: Config) -> EdgeTower:
        """See Family."""
        return EdgeTower(self, parts, config)


_COSMOS3 = variant(
    QWEN3_VL,
    "cosmos3_omni",
    "Cosmos 3 (reasoner)",
    tower=replace(QWEN3_VL.tower, prefixes={**QWEN3_VL.tower.prefixes, **{name: name for name in _UNIFIED}}),
    transformers="5.23.0",
)

_EDGE = EdgeFamily(
    model_type="cosmos3_edge",
    title="Cosmos 3 Edge",
    tower=stock("cosmos3_edge.Cosmos3EdgeVisionModel", in_model("visual."), renames=_RENAMED),
    beside=projector("cosmos3_edge.Cosmos3EdgePatchMerger", in_model("projector.")),
    width="text_config.hidden_size",
    layers="encoder.layers",
    image_areas=AreaRule(spans_frames=True),
    video_areas=AreaRule(pixels=(64 * 64, 24 * 1024 * 1024), spans_frames=True),
    transformers="5.23.0",
)

ROWS = (_COSMOS3, _EDGE)
