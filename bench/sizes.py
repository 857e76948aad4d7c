"""Sizes that a vision encoder meets in production, as a table: what benchmarks run on without a trace.

Fitted on 2026-11-20 to 15,867 images sampled from the ServeGen distributions of a production Qwen-VL
service (arXiv 2505.09999, workload mm-image, 20:00 and 21:00 of its day): image counts and tokens of
those two windows were assigned to hand-set, rounded anchors. It keeps what packing depends on (quartiles,
icons of 4 to 9 tokens, sizes that come again and again, the spike under the processor's upper bound of
1280) and leaves out how sizes follow one another and the mix of other hours (at night a quarter are icons).
"""

from collections.abc import Iterator
from math import isqrt

import numpy as np

from vitwire_server.core.grids import Footprint, Grid

MERGE = 2
ATOMS = (
    # tokens, per cent of items
    *((4, 2.0), (6, 10.1), (20, 0.5), (40, 0.4), (64, 2.0), (80, 0.8), (100, 0.6), (120, 0.8), (144, 2.3)),
    *((160, 1.0), (180, 2.7), (200, 0.8), (216, 2.3), (234, 0.9), (252, 12.4), (270, 0.8), (290, 1.4)),
    *((324, 1.9), (340, 0.7), (360, 1.5), (396, 1.3), (432, 9.1), (450, 1.0), (486, 2.5), (510, 1.7)),
    *((540, 0.8), (576, 1.7), (610, 1.2), (660, 1.2), (720, 2.0), (780, 0.5), (830, 0.8), (888, 2.8)),
    *((940, 0.5), (999, 4.2), (1100, 1.3), (1196, 9.2), (1212, 0.5), (1224, 3.4), (1230, 3.3), (1242, 1.2)),
    *((1248, 1.9), (1260, 1.1), (1272, 1.1)),
)
EXACT = 0.77
"""Share of items with exactly the tokens of their atom; others are between it and the next."""
IMAGES = ((1, 0.80), (2, 0.06), (3, 0.11), (4, 0.015), (5, 0.007), (6, 0.005), (8, 0.003))
"""Images per request, and the share of such requests."""
_SLIMMEST = 3
"""Maximum aspect ratio of a grid, if a number of tokens nearby allows it."""


def trace(requests: int, seed: int) -> Iterator[list[Grid]]:
    """Grids of the images of `requests` requests; deterministic."""
    rng = np.random.default_rng(seed)
    tokens, shares = (np.array(column) for column in zip(*ATOMS, strict=True))
    counts, often = (np.array(column) for column in zip(*IMAGES, strict=True))
    for count in rng.choice(counts, size=requests, p=often / often.sum()):
        atoms = rng.choice(len(tokens), size=count, p=shares / shares.sum())
        yield [grid_of(_near(tokens, int(atom), rng)) for atom in atoms]


def footprints(requests: int, seed: int) -> list[Footprint]:
    """Footprints of the images of `trace`, in order of arrival."""
    grids = (grid for request in trace(requests, seed) for grid in request)
    return [Footprint(grid.patches, grid.patches // MERGE**2, grid.t, grid.frame_patches) for grid in grids]


def grid_of(tokens: int) -> Grid:
    """The most square grid with this number of tokens; one fewer if only a strip has it."""
    while True:
        height = next(side for side in range(isqrt(tokens), 0, -1) if tokens % side == 0)
        if tokens // height <= _SLIMMEST * height:
            return Grid(1, MERGE * height, MERGE * (tokens // height))
        tokens -= 1


def _near(tokens: np.ndarray, atom: int, rng: np.random.Generator) -> int:
    """The atom's tokens, or a number between it and the next atom."""
    exact = atom + 1 == len(tokens) or rng.random() < EXACT
    return int(tokens[atom] if exact else rng.integers(tokens[atom], tokens[atom + 1]))
