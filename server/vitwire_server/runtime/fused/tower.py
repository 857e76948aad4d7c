"""A tower's blocks and what stands around them, computed by our kernels where they have a form that is supported."""

from vitwire_server.runtime.attention.selection import Selection
from vitwire_server.runtime.fused.blocks import fuse
from vitwire_server.runtime.fused.float8_blocks import fuse_float8
from vitwire_server.runtime.fused.layers import fuse_layers
from vitwire_server.runtime.fused.learned_positions import hasten_positions
from vitwire_server.runtime.fused.mergers import hasten_mergers
from vitwire_server.towers.tower import Tower


def fuse_tower(tower: Tower, attention: Selection | None, *, reduced: bool = False) -> int:
    """Fuse the blocks of a tower on CUDA; returns their number.

    `attention` is None for towers of tiles. `reduced`: the layers were reduced to float8.
    """
    if attention and all(hasattr(block, "attn") for block in tower.blocks):
        fused = (fuse_float8 if reduced else fuse)(tower.blocks, attention)
    else:
        fused = 0 if reduced else fuse_layers(tower.blocks, attention)
    if attention:
        hasten_mergers(tower.model, tower.blocks)
        hasten_positions(tower.model)
    return fused
