"""The tower that a server serves, without its weights."""

import torch

from vitwire_server.core.pooling import Pooling
from vitwire_server.runtime.attention.selection import select
from vitwire_server.towers.checkpoints.checkpoint import open_checkpoint, unfilled_tower
from vitwire_server.towers.tower import Tower

CPU = torch.device("cpu")


def served(model: str, pooling: str, dtype: str, attention: str) -> Tower:
    """The tower of a checkpoint's folder; `attention` is the name of its backend."""
    tower = unfilled_tower(open_checkpoint(model).pooled(Pooling(pooling)), getattr(torch, dtype))
    attend(tower, attention)
    return tower


def attend(tower: Tower, attention: str) -> None:
    """Use the backend in a tower with segments."""
    if tower.segmented:
        heads, resampler = tower.attention_heads, tower.resampler_heads
        choice = select(attention, CPU, tower.dtype, *heads, captured=False, resampler=resampler)
        tower.use_attention(choice.implementation)
