"""Towers in float8: every kind of them against plain transformers, with and without company."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from checkpoints import MODEL_TYPES, Checkpoints
from reference import Reference
from rigs import Rig, draw_grids
from vitwire_server.config.settings import UsageError
from vitwire_server.process.computing import reduce_precision
from vitwire_server.runtime.memory.streams import HostStreams
from vitwire_server.runtime.precision.float8 import reduce
from vitwire_server.runtime.precision.similarity import Comparison, least_cosines
from vitwire_server.runtime.staging import Stager
from vitwire_server.towers.files import CheckpointError

References = Callable[..., Reference]
CPU = torch.device("cpu")
EVERYDAY = ("qwen2_5_vl", "gemma4")
FLOOR, MEDIAN = 0.9, 0.98
"""Rows of random weights and few columns; wrong ones are below 0.5."""


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.matrix) for name in MODEL_TYPES]
)
def test_rows_of_a_tower_in_float8(model_type: str, checkpoints: Checkpoints, references: References) -> None:
    reference = references(model_type, torch.float32)
    rig = Rig.of(checkpoints(model_type), torch.bfloat16, CPU, sizes=())
    comparison = Comparison(rig.tower, rig.engine)
    assert float(comparison.similarities().min()) == pytest.approx(1)
    assert sum(reduce(block) for block in rig.tower.blocks) >= 2 * len(rig.tower.blocks)
    assert rig.tower.dtype is torch.bfloat16
    similarities = comparison.similarities()
    assert close(similarities)
    assert float(similarities.min()) < 1 - 1e-5, "it is in float8"

    grids = draw_grids(rig, 1, 4)
    items = rig.items(grids)
    alone, together = [rig.run([item])[0] for item in items], rig.run(items)
    parts = 1 + rig.tower.geometry.levels
    found = []
    for i, (grid, own, packed) in enumerate(zip(grids, alone, together, strict=True)):
        exact = torch.as_tensor(reference.item(grid, rig.pixels(grid, i), rig.crops(grid, i)))
        found += [least_cosines(exact, torch.as_tensor(rows), parts) for rows in (own, packed)]
    assert close(torch.cat(found))


def close(similarities: Tensor) -> bool:
    return bool(similarities.min() > FLOOR and similarities.median() > MEDIAN)


class TestRefusals:
    """What the server says at its start if float8 cannot be served."""

    def refused(self, rig: Rig, finish: Callable[[], None] = lambda: None) -> str:
        stager = Stager(rig.tower.geometry, rig.modalities, CPU)
        with pytest.raises(UsageError) as error:
            reduce_precision(rig.tower, stager, HostStreams(), floor=0.0, finish=finish)
        return str(error.value)

    def test_rows_that_are_not_finite_reach_no_floor(self, checkpoints: Checkpoints) -> None:
        rig = Rig.of(checkpoints("qwen3_vl"), torch.bfloat16, CPU, sizes=())

        def lose() -> None:
            rig.tower.blocks[0].get_buffer("attn.qkv.scales")[5] = torch.nan

        assert "the lowest cosine similarity to bfloat16 is nan" in self.refused(rig, lose)

    def test_nothing_to_reduce_is_an_error(self, checkpoints: Checkpoints) -> None:
        rig = Rig.of(checkpoints("qwen3_vl"), torch.bfloat16, CPU, sizes=())
        for block in rig.tower.blocks:
            reduce(block)
        assert "no linear layer of this tower can be computed in float8" in self.refused(rig)

    def test_a_tower_that_is_lost_before_is_no_reference(self, checkpoints: Checkpoints) -> None:
        rig = Rig.of(checkpoints("qwen3_vl"), torch.bfloat16, CPU, sizes=())
        rig.tower.blocks[0].get_parameter("attn.qkv.bias")[5] = torch.nan
        with pytest.raises(CheckpointError, match="the forward of a test picture failed"):
            self.refused(rig)
