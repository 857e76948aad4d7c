"""One row per image, of every row of the table and every pooling that it offers, against transformers' own."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from broken import config, load
from checkpoints import MODEL_TYPES, Checkpoints, graphs_and_packing
from client_models import client_model
from host_tensors import NoHostTensors
from plain_reference import PlainReference
from raster_reference import Siglip2
from reference import TOLERANCE, Array, error, norm_error
from rigs import BUDGETS, Rig, draw_grids
from vitwire import Item
from vitwire._delivery.answers import Expected
from vitwire_server.core.grids import Grid
from vitwire_server.core.models import TileGeometry
from vitwire_server.core.pooling import Pooling
from vitwire_server.runtime.attention.selection import select
from vitwire_server.towers.checkpoints.checkpoint import open_checkpoint
from vitwire_server.towers.files import CheckpointError
from vitwire_server.towers.registry import FAMILIES

Pooled = PlainReference | Siglip2
References = Callable[[str, torch.dtype], Pooled]
CPU = torch.device("cpu")
OFFERED = [
    (name, pooling)
    for name in MODEL_TYPES
    for pooling in dict.fromkeys(pooler.pooling for pooler in FAMILIES[name].poolers)
]
EVERYDAY = {
    ("clip", Pooling.CLS),
    ("siglip", Pooling.ATTENTION),
    ("dinov2_with_registers", Pooling.MEAN),
    ("siglip2", Pooling.ATTENTION),
}
"""One for each mechanism."""
CASES = [case if case in EVERYDAY else pytest.param(*case, marks=pytest.mark.matrix) for case in OFFERED]


def expected(rig: Rig, reference: Pooled, pooling: Pooling, grids: list[Grid], seed: int = 0) -> list[Array]:
    """Rows of `rig.items(grids, seed)`, each alone."""
    return [reference.pooled(pooling, rig.pixels(grid, seed + i), grid) for i, grid in enumerate(grids)]


@pytest.mark.parametrize(("model_type", "pooling"), CASES)
class TestRows:
    """What a pooled tower returns."""

    @graphs_and_packing
    def test_float32_equals_transformers(
        self,
        model_type: str,
        pooling: Pooling,
        graphs: bool,
        packed: bool,
        checkpoints: Checkpoints,
        references: References,
    ) -> None:
        folder = checkpoints(model_type)
        rig = Rig.of(folder, torch.float32, CPU, sizes=BUDGETS if graphs else (), pooling=pooling)
        grids = draw_grids(rig, 1, 8)
        items = rig.items(grids)
        encoded = rig.run(items) if packed else [rig.run([item])[0] for item in items]
        theirs = expected(rig, references(model_type, torch.float32), pooling, grids)
        for grid, own, other in zip(grids, encoded, theirs, strict=True):
            assert own.shape == (grid.t, rig.tower.geometry.width), "a row for each image or frame"
            assert error(own, other) <= TOLERANCE, grid

    @pytest.mark.matrix
    def test_bfloat16_loses_no_more_than_transformers_does(
        self, model_type: str, pooling: Pooling, checkpoints: Checkpoints, references: References
    ) -> None:
        rig = Rig.of(checkpoints(model_type), torch.bfloat16, CPU, pooling=pooling)
        grids = draw_grids(rig, 2, 6) * 4
        exact, rounded = (
            expected(rig, references(model_type, dtype), pooling, grids) for dtype in (torch.float32, torch.bfloat16)
        )
        ours, theirs = (
            [norm_error(own, other) for own, other in zip(rows, exact, strict=True)]
            for rows in (rig.run(rig.items(grids)), rounded)
        )
        assert np.mean(ours) <= 1.1 * np.mean(theirs)

    def test_items_of_a_batch_do_not_reach_each_other(
        self, model_type: str, pooling: Pooling, checkpoints: Checkpoints, references: References
    ) -> None:
        """Neither NaN of another item nor what lay in static buffers before."""
        rig = Rig.of(checkpoints(model_type), torch.float32, CPU, pooling=pooling)
        large, small = (Grid(2, 1, 2), Grid(1, 1, 1)) if tiled(rig) else (Grid(1, 12, 12), Grid(1, 6, 6))
        (theirs,) = expected(rig, references(model_type, torch.float32), pooling, [small], 3)
        good = rig.items([small], 3)[0]
        nan = rig.item(large, torch.full_like(rig.pixels(large, 0), torch.nan))
        rig.poison()
        first, second = rig.engine.launch([good, nan], rig.holding([good, nan])).collect().results
        assert isinstance(second, Exception)
        assert not isinstance(first, Exception)
        assert error(np.frombuffer(first.data, np.float32).reshape(first.shape), theirs) <= TOLERANCE
        rig.poison()
        assert error(rig.run([good])[0], theirs) <= TOLERANCE

    def test_forward_runs_on_the_meta_device(self, model_type: str, pooling: Pooling, checkpoints: Checkpoints) -> None:
        tower = Rig.of(checkpoints(model_type), torch.bfloat16, CPU, sizes=(), pooling=pooling).tower
        for module in tower.modules.values():
            module.to("meta")
        choice = select("auto", tower.device, tower.dtype, *tower.attention_heads, captured=True)
        tower.use_attention(choice.implementation)
        capacity = tower.capacity(tower.budget(64, max_items=8, max_frames=16))
        pixels = torch.empty(capacity.patches, tower.geometry.row, dtype=torch.bfloat16, device="meta")
        metadata = tower.reserve(capacity)
        with NoHostTensors():
            rows = tower.forward(pixels, metadata)
        assert rows.shape == (tower.rows(capacity), tower.geometry.width)

    def test_the_client_expects_a_row_for_each_frame_and_knows_the_pooling(
        self, model_type: str, pooling: Pooling, checkpoints: Checkpoints
    ) -> None:
        model = client_model(checkpoints(model_type), pooling)
        assert model.pooling == pooling
        assert model.pooling in model.available_poolings
        assert model.available_poolings[0] == "none"
        frames = Expected.of(Item(None, (3, 1, 1), "video", content_id="x"), model)
        assert (frames.rows, frames.exact, frames.width) == (3, True, model.embedding_width)
        rig = Rig.of(checkpoints(model_type), torch.float32, CPU, sizes=(), pooling=pooling)
        assert not rig.tower.geometry.prunes, "there is nothing to prune of a frame"


@pytest.fixture(scope="module")
def references(checkpoints: Checkpoints) -> References:
    made: dict[tuple[str, torch.dtype], Pooled] = {}

    def reference(model_type: str, dtype: torch.dtype) -> Pooled:
        key = (model_type, dtype)
        if key not in made:
            kind = Siglip2 if model_type == "siglip2" else PlainReference
            made[key] = kind(checkpoints(model_type), dtype)
        return made[key]

    return reference


def tiled(rig: Rig) -> bool:
    return isinstance(rig.tower.geometry, TileGeometry)


@pytest.mark.parametrize("model_type", ["clip", "siglip2"])
def test_every_pooling_has_a_fingerprint_of_its_own(model_type: str, checkpoints: Checkpoints) -> None:
    checkpoint = open_checkpoint(str(checkpoints(model_type)))
    found = {load(checkpoints(model_type), pooling).fingerprint for pooling in checkpoint.poolings}
    assert len(found) == len(checkpoint.poolings) == 3
    assert load(checkpoint.folder).fingerprint in found


def test_what_a_model_does_not_offer_is_refused(checkpoints: Checkpoints) -> None:
    for model_type, offered in (
        ("qwen3_vl", "none"),
        ("clip", "none, cls, mean"),
        ("siglip", "none, attention, mean"),
    ):
        checkpoint = open_checkpoint(str(checkpoints(model_type)))
        for pooling in set(Pooling) - set(checkpoint.poolings):
            with pytest.raises(ValueError, match=rf"\({model_type}\) offers {offered}$"):
                checkpoint.pooled(pooling)


@pytest.mark.parametrize("model_type", ["siglip_vision_model", "siglip2"])
def test_a_checkpoint_without_a_head_does_not_offer_attention(model_type: str, copied: Checkpoints) -> None:
    field = "vision_use_head" if model_type == "siglip_vision_model" else "vision_config__vision_use_head"
    folder = copied(model_type)
    config(**{field: False})(folder)
    assert open_checkpoint(str(folder)).poolings == (Pooling.NONE, Pooling.MEAN)


def test_a_clip_tower_without_the_projection_pools_the_class_token_alone(
    copied: Checkpoints, references: References
) -> None:
    folder = copied("clip_vision_model")
    config(architectures=["CLIPVisionModel"])(folder)
    rig = Rig.of(folder, torch.float32, CPU, sizes=(), pooling=Pooling.CLS)
    grid = Grid(2, 1, 1)
    with torch.inference_mode():
        model = references("clip_vision_model", torch.float32).model.vision_model
        theirs = model(pixel_values=rig.pixels(grid, 0)).pooler_output.numpy()
    assert error(rig.run(rig.items([grid]))[0], theirs) <= TOLERANCE


def test_a_missing_projection_is_named(copied: Checkpoints) -> None:
    folder = copied("mlcd")
    config(model_type="clip_vision_model", architectures=["CLIPVisionModelWithProjection"])(folder)
    with pytest.raises(CheckpointError, match="holds no vision projection: no weight is named visual_projection"):
        load(folder, Pooling.CLS)


@pytest.mark.parametrize(
    ("fields", "lengths"),
    [
        ({}, None),
        ({"is_matryoshka": False}, None),
        ({"is_matryoshka": True}, ()),
        ({"matryoshka_dimensions": [32, 16, 32]}, (16, 32)),
        ({"matryoshka_dimensions": [32], "is_matryoshka": True}, (32,)),
    ],
)
def test_a_checkpoint_says_whether_vectors_may_be_cut(
    fields: dict[str, object], lengths: tuple[int, ...] | None, copied: Checkpoints
) -> None:
    folder = copied("clip")
    config(**fields)(folder)
    assert open_checkpoint(str(folder)).matryoshka == lengths


@pytest.mark.parametrize("lengths", [[0], ["16"], [True], 16, {"16": 1}])
def test_malformed_lengths_of_vectors_are_refused(lengths: object, copied: Checkpoints) -> None:
    folder = copied("clip")
    config(matryoshka_dimensions=lengths)(folder)
    with pytest.raises(CheckpointError, match="matryoshka_dimensions must be a list of positive integers"):
        open_checkpoint(str(folder))
