"""A tower's layers and what stands around them, computed by our kernels where they have a form that is supported."""

from vitwire_server.runtime.attention.selection import Selection
from vitwire_server.runtime.fused.fusing import fuse
from vitwire_server.runtime.fused.learned_positions import hasten_positions
from vitwire_server.runtime.fused.mergers import hasten_mergers
from vitwire_server.towers.tower import Tower


def fuse_tower(tower: Tower, attention: Selection | None, *, reduced: bool = False) -> int:
    """Fuse the layers of a tower on CUDA; returns their number.

    `attention` is None for towers of tiles. `reduced`: the layers were reduced to float8.
    """
    fused = fuse(tower.blocks, attention, reduced=reduced)
    if attention:
        hasten_mergers(tower.model, tower.blocks)
        hasten_positions(tower.model)
    return fused
