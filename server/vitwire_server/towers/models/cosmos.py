"""Cosmos (NVIDIA): Qwen3-VL's tower, under its names and under those of the unified checkpoints."""

from dataclasses import replace

from vitwire_server.towers.family import Family
from vitwire_server.towers.models.qwen import QWEN3_VL

_UNIFIED = ("blocks.", "merger.", "patch_embed.", "pos_embed.", "deepstack_merger_list.")
"""Beginnings of the tower's weights where a checkpoint holds them beside a generator's, without a prefix."""

_COSMOS3 = replace(
    QWEN3_VL,
    model_type="cosmos3_omni",
    title="Cosmos 3 (reasoner)",
    tower=replace(QWEN3_VL.tower, prefixes={**QWEN3_VL.tower.prefixes, **{name: name for name in _UNIFIED}}),
    transformers="5.23.0",
)

ROWS: tuple[Family, ...] = (_COSMOS3,)
