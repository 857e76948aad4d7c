"""Towers in float8: every kind of them against plain transformers, with and without company."""

from collections.abc import Callable, Collection

import pytest
import torch
from torch import Tensor

from checkpoints import MODEL_TYPES, Checkpoints
from reference import Reference
from rigs import Rig, draw_grids
from vitwire_server.config.settings import ServeSettings, UsageError
from vitwire_server.core.models import Precision
from vitwire_server.process.computing import reduce_precision
from vitwire_server.runtime.memory.streams import HostStreams
from vitwire_server.runtime.precision.choosing import Half, Reducible, named
from vitwire_server.runtime.precision.float8 import Float8Linear, reduce
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


def fp8(**settings: object) -> ServeSettings:
    return ServeSettings.model_validate({"model": "m", "precision": "fp8", **settings})


def in_float8(rig: Rig) -> list[Half]:
    """The halves of blocks that are in float8."""
    return sorted(
        {
            Half(number, "attn" if "attn" in name else "mlp")
            for number, block in enumerate(rig.tower.blocks)
            for name, layer in block.named_modules()
            if isinstance(layer, Float8Linear)
        }
    )


def close(similarities: Tensor) -> bool:
    return bool(similarities.min() > FLOOR and similarities.median() > MEDIAN)


class TestChoice:
    """Which blocks a start reduces."""

    def reduced(self, rig: Rig, finish: Callable[[], None] = lambda: None, **settings: object) -> Precision:
        stager = Stager(rig.tower.geometry, rig.modalities, CPU)
        return reduce_precision(rig.tower, stager, HostStreams(), fp8(**settings), finish)

    def test_as_many_halves_as_reach_the_floor(self, checkpoints: Checkpoints) -> None:
        rig = Rig.of(checkpoints("qwen3_vl"), torch.bfloat16, CPU, sizes=())
        comparison, reducible = Comparison(rig.tower, rig.engine), Reducible(rig.tower.blocks)

        def lowest(halves: Collection[Half]) -> float:
            reducible.reduce(halves)
            return float(comparison.similarities().min())

        whole, alone = lowest(list(reducible.sizes)), {half: lowest([half]) for half in reducible.sizes}
        assert len(alone) == 8, "both halves of four blocks"
        assert lowest([]) == pytest.approx(1), "exact again"
        best = min(alone, key=lambda half: (1 - alone[half]) / reducible.sizes[half])
        floor = (whole + alone[best]) / 2
        found = self.reduced(rig, precision_floor=floor)
        chosen = in_float8(rig)
        assert best in chosen
        assert len(chosen) < len(alone)
        assert found.similarity >= floor > whole
        assert found.blocks == named(chosen)
        assert found.layers == sum(1 if half.name == "attn" else 2 for half in chosen)
        again = Rig.of(checkpoints("qwen3_vl"), torch.bfloat16, CPU, sizes=())
        assert self.reduced(again, precision_floor=floor) == found, "equal starts choose the same"
        pinned = Rig.of(checkpoints("qwen3_vl"), torch.bfloat16, CPU, sizes=())
        assert self.reduced(pinned, precision_floor=floor, precision_blocks=found.blocks) == found

    def test_named_blocks_are_taken_whatever_they_lose(self, checkpoints: Checkpoints) -> None:
        rig = Rig.of(checkpoints("qwen3_vl"), torch.bfloat16, CPU, sizes=())
        found = self.reduced(rig, precision_floor=0.9, precision_blocks="0,mlp:1,attn:2-3")
        expected = [(0, "attn"), (0, "mlp"), (1, "mlp"), (2, "attn"), (3, "attn")]
        assert in_float8(rig) == expected
        assert (found.blocks, found.layers) == ("0,attn:2-3,mlp:1", 7)
        every = Rig.of(checkpoints("qwen3_vl"), torch.bfloat16, CPU, sizes=())
        found = self.reduced(every, precision_floor=0.9, precision_blocks="all")
        assert (found.blocks, found.layers) == ("", 12)

    def test_blocks_that_do_not_exist_are_named(self, checkpoints: Checkpoints) -> None:
        rig = Rig.of(checkpoints("qwen3_vl"), torch.bfloat16, CPU, sizes=())
        with pytest.raises(UsageError, match=r"--precision-blocks 0-9: block 4 cannot be reduced; the tower has 0-3"):
            self.reduced(rig, precision_blocks="0-9")
        with pytest.raises(UsageError, match=r"mlp:4 cannot be reduced"):
            self.reduced(rig, precision_blocks="mlp:3-4")

    def test_too_few_blocks_are_not_served(self, checkpoints: Checkpoints) -> None:
        rig = Rig.of(checkpoints("qwen3_vl"), torch.bfloat16, CPU, sizes=())
        with pytest.raises(
            UsageError, match=r"0% of the blocks' weights in float8 reach the floor, less than the 25% that"
        ):
            self.reduced(rig, precision_floor=1.0)

    def test_rows_of_a_mixed_tower_are_those_of_transformers(
        self, checkpoints: Checkpoints, references: References
    ) -> None:
        """Between exact and reduced blocks, rows are bfloat16: one reduced block may lose no more than all do."""
        reference = references("qwen3_vl", torch.float32)
        losses = []
        for blocks in ("1", "all"):
            rig = Rig.of(checkpoints("qwen3_vl"), torch.bfloat16, CPU, sizes=())
            self.reduced(rig, precision_floor=0.9, precision_blocks=blocks)
            grids = draw_grids(rig, 1, 4)
            cosines = [
                least_cosines(
                    torch.as_tensor(reference.item(grid, rig.pixels(grid, i), rig.crops(grid, i))),
                    torch.as_tensor(rows),
                    1 + rig.tower.geometry.levels,
                )
                for i, (grid, rows) in enumerate(zip(grids, rig.run(rig.items(grids)), strict=True))
            ]
            losses.append(1 - float(torch.cat(cosines).mean()))
        assert 0 < losses[0] < losses[1] < 1 - MEDIAN


class TestRefusals:
    """What the server says at its start if float8 cannot be served."""

    def refused(self, rig: Rig, finish: Callable[[], None] = lambda: None) -> str:
        stager = Stager(rig.tower.geometry, rig.modalities, CPU)
        with pytest.raises(UsageError) as error:
            reduce_precision(rig.tower, stager, HostStreams(), fp8(precision_floor=0.0), finish)
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
