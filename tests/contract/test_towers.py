"""What every row of the table of models must hold, run over every row."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from conftest import MODEL_TYPES, Checkpoints
from reference import TOLERANCE, Reference, error, norm_error
from rigs import BUDGETS, Rig
from vitwire_server.core.budgets import budget
from vitwire_server.core.grids import Grid
from vitwire_server.runtime.attention import choose
from vitwire_server.towers.checkpoint import CheckpointError, load_tower, open_checkpoint

References = Callable[[str, torch.dtype], Reference]
CPU = torch.device("cpu")


def draw_grids(seed: int, count: int) -> list[Grid]:
    """Images and clips of random even sizes, the smallest and one larger than every budget included."""
    rng = np.random.default_rng(seed)
    sides = rng.integers(1, 12, size=(count, 2)) * 2
    frames = rng.choice([1, 1, 2, 3, 5], size=count)
    drawn = [Grid(int(t), int(h), int(w)) for t, (h, w) in zip(frames, sides, strict=True)]
    return [*drawn, Grid(1, 2, 2), Grid(3, 2, 2), Grid(1, 40, 36)]


def draw_pixels(rig: Rig, grid: Grid, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    columns = rig.tower.geometry.columns(frames=rig.tower.geometry.temporal)
    return torch.randn(grid.patches, columns, generator=generator)


@pytest.fixture(scope="module")
def rigs(checkpoints: Checkpoints) -> Callable[..., Rig]:
    made: dict[tuple[str, torch.dtype, bool], Rig] = {}

    def rig(model_type: str, dtype: torch.dtype = torch.float32, *, graphs: bool) -> Rig:
        key = (model_type, dtype, graphs)
        if key not in made:
            made[key] = Rig.of(checkpoints(model_type), dtype, CPU, sizes=BUDGETS if graphs else ())
        return made[key]

    return rig


@pytest.mark.parametrize("packed", [False, True], ids=["alone", "packed"])
@pytest.mark.parametrize("graphs", [False, True], ids=["off", "simulated"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
class TestParity:
    """Images and clips of random grids, alone and with others, against plain transformers."""

    def test_float32_equals_transformers(
        self, model_type: str, graphs: bool, packed: bool, rigs: Callable[..., Rig], references: References
    ) -> None:
        rig, reference = rigs(model_type, graphs=graphs), references(model_type, torch.float32)
        grids = draw_grids(1, 12)
        pixels = [draw_pixels(rig, grid, i) for i, grid in enumerate(grids)]
        items = [rig.item(grid, x) for grid, x in zip(grids, pixels, strict=True)]
        encoded = rig.run(items) if packed else [rig.run([item])[0] for item in items]
        expected = [reference.encode(x, [grid])[0] for grid, x in zip(grids, pixels, strict=True)]
        errors = {str(g): error(a, b) for g, a, b in zip(grids, encoded, expected, strict=True)}
        assert max(errors.values()) <= TOLERANCE, errors

    def test_bfloat16_loses_no_more_than_transformers_does(
        self, model_type: str, graphs: bool, packed: bool, rigs: Callable[..., Rig], references: References
    ) -> None:
        rig = rigs(model_type, torch.bfloat16, graphs=graphs)
        grids = draw_grids(2, 12)
        pixels = [draw_pixels(rig, grid, i).bfloat16() for i, grid in enumerate(grids)]
        items = [rig.item(grid, x) for grid, x in zip(grids, pixels, strict=True)]
        encoded = rig.run(items) if packed else [rig.run([item])[0] for item in items]
        exact, rounded = references(model_type, torch.float32), references(model_type, torch.bfloat16)
        ours, theirs = [], []
        for grid, x, rows in zip(grids, pixels, encoded, strict=True):
            expected = exact.encode(x, [grid])[0]
            ours.append(norm_error(rows, expected))
            theirs.append(norm_error(rounded.encode(x, [grid])[0], expected))
        assert np.mean(ours) <= 1.1 * np.mean(theirs)
        assert max(ours) <= 1.1 * max(theirs)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
class TestGraphs:
    """Static buffers: what lies in them from before must never reach a result."""

    def test_poisoned_buffers_and_reuse_change_nothing(
        self, model_type: str, rigs: Callable[..., Rig], references: References
    ) -> None:
        rig, reference = rigs(model_type, graphs=True), references(model_type, torch.float32)
        for grids in ([Grid(1, 2, 4)], [Grid(1, 16, 20), Grid(2, 8, 8)], [Grid(1, 2, 4)], [Grid(2, 6, 10)]):
            rig.poison()
            pixels = [draw_pixels(rig, grid, 7) for grid in grids]
            encoded = rig.run([rig.item(grid, x) for grid, x in zip(grids, pixels, strict=True)])
            for grid, x, rows in zip(grids, pixels, encoded, strict=True):
                assert error(rows, reference.encode(x, [grid])[0]) <= TOLERANCE

    def test_non_finite_pixels_of_one_batch_do_not_reach_the_next(
        self, model_type: str, rigs: Callable[..., Rig], references: References
    ) -> None:
        rig, reference = rigs(model_type, graphs=True), references(model_type, torch.float32)
        large, small = Grid(1, 12, 12), Grid(1, 4, 4)
        nan = rig.item(large, torch.full_like(draw_pixels(rig, large, 0), torch.nan))
        budget_of = rig.planner.plan([nan.footprint]).batches[0].budget
        (refused,) = rig.engine.launch([nan], budget_of).collect().results
        assert isinstance(refused, Exception), "a non-finite embedding is never returned"
        pixels = draw_pixels(rig, small, 3)
        collected = rig.engine.launch([rig.item(small, pixels), nan], budget_of).collect()
        first, second = collected.results
        assert isinstance(second, Exception)
        assert not isinstance(first, Exception)
        rows = np.frombuffer(first.data, np.float32).reshape(first.shape)
        assert error(rows, reference.encode(pixels, [small])[0]) <= TOLERANCE

    def test_forward_runs_on_the_meta_device(self, model_type: str, checkpoints: Checkpoints) -> None:
        """No host synchronisation and no data-dependent shape: either would raise here."""
        checkpoint = open_checkpoint(str(checkpoints(model_type)))
        loaded = load_tower(checkpoint, dtype=torch.bfloat16, device=CPU, track=lambda shards, *_: shards)
        loaded.tower.model.to("meta")
        tower = loaded.tower
        choice = choose("auto", tower.device, tower.dtype, *tower.heads, captured=True)
        tower.use_attention(choice.backend.implementation)
        capacity = tower.capacity(budget(64, merge=tower.geometry.merge, max_items=8, max_frames=16))
        columns = tower.geometry.columns(frames=tower.geometry.temporal)
        pixels = torch.empty(capacity.patches, columns, dtype=torch.bfloat16, device="meta")
        metadata = tower.reserve(capacity)
        rows = tower.forward(pixels, metadata)
        assert rows.shape == (64, tower.geometry.width)
        for key in metadata.tensors:
            incomplete = {k: v for k, v in metadata.tensors.items() if k != key}
            with pytest.raises((RuntimeError, NotImplementedError, ValueError)):
                tower.model(
                    pixels,
                    grid_thw=torch.ones(1, 3, dtype=torch.int64, device="meta"),
                    **incomplete,
                    **metadata.bounds,
                )


@pytest.mark.parametrize("model_type", MODEL_TYPES)
class TestFormsOfPixels:
    """The compact forms give what the processor's own tensors give."""

    def test_uint8_equals_normalised_floats(
        self, model_type: str, rigs: Callable[..., Rig], checkpoints: Checkpoints
    ) -> None:
        rig = rigs(model_type, graphs=True)
        settings = json.loads((checkpoints(model_type) / "video_preprocessor_config.json").read_text())
        mean, std = (torch.tensor(settings[key]).double().view(-1, 1, 1) for key in ("image_mean", "image_std"))
        grid, geometry = Grid(2, 8, 10), rig.tower.geometry
        raw = torch.randint(0, 256, (grid.patches, geometry.columns(frames=geometry.temporal)), dtype=torch.uint8)
        shaped = raw.view(grid.patches, geometry.channels, -1, geometry.patch**2).double()
        floats = ((shaped * settings["rescale_factor"] - mean) / std).float().view(raw.shape)
        compact, full = rig.run([rig.item(grid, raw), rig.item(grid, floats)])
        assert error(compact, full) <= TOLERANCE

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
    def test_single_frame_images_equal_duplicated_ones(
        self, model_type: str, dtype: torch.dtype, rigs: Callable[..., Rig]
    ) -> None:
        rig = rigs(model_type, graphs=False)
        grid, geometry = Grid(1, 8, 10), rig.tower.geometry
        single = torch.randint(0, 256, (grid.patches, geometry.channels, 1, geometry.patch**2)).to(dtype)
        doubled = single.expand(-1, -1, geometry.temporal, -1).reshape(grid.patches, -1)
        first, second = (rig.run([rig.item(grid, x)])[0] for x in (single.flatten(1), doubled))
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
class TestLoading:
    """Only the tower's weights are read, whatever they are called."""

    def test_shards_of_the_language_model_may_be_absent(
        self, model_type: str, checkpoints: Checkpoints, tmp_path: Path
    ) -> None:
        folder = Path(shutil.copytree(checkpoints(model_type), tmp_path / "copy"))
        weights = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        needed = {shard for key, shard in weights.items() if "visual" in key}
        absent = set(weights.values()) - needed
        assert absent, "the demo checkpoint has a shard without vision weights"
        for shard in absent:
            (folder / shard).unlink()
        assert fingerprint(folder) == fingerprint(checkpoints(model_type))
        missing = min(needed)
        (folder / missing).unlink()
        with pytest.raises(CheckpointError, match=missing):
            fingerprint(folder)

    @pytest.mark.parametrize("prefix", ["visual.", "model.visual."])
    def test_both_generations_of_key_names_load(
        self, model_type: str, prefix: str, checkpoints: Checkpoints, tmp_path: Path
    ) -> None:
        source = checkpoints(model_type)
        renamed = {
            prefix + key.partition("visual.")[2]: tensor
            for shard in sorted(source.glob("*.safetensors"))
            for key, tensor in load_file(shard).items()
            if "visual." in key
        }
        for name in ("config.json", "preprocessor_config.json", "video_preprocessor_config.json"):
            shutil.copy(source / name, tmp_path)
        save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        assert fingerprint(tmp_path) == fingerprint(source)

    def test_a_missing_weight_is_named(self, model_type: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(checkpoints(model_type), tmp_path / "copy"))
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        gone = next(key for key in content["weight_map"] if key.endswith("blocks.2.norm1.weight"))
        del content["weight_map"][gone]
        index.write_text(json.dumps(content))
        with pytest.raises(CheckpointError, match=r"missing keys: blocks\.2\.norm1\.weight"):
            fingerprint(folder)

    def test_rotary_frequencies_stay_float32(self, model_type: str, rigs: Callable[..., Rig]) -> None:
        half, full = (rigs(model_type, dtype, graphs=False).tower.model for dtype in (torch.bfloat16, torch.float32))
        for (name, buffer), (_, exact) in zip(half.named_buffers(), full.named_buffers(), strict=True):
            assert torch.equal(buffer, exact), name

    def test_footprint_is_what_the_tower_returns(
        self, model_type: str, rigs: Callable[..., Rig], references: References
    ) -> None:
        rig, reference = rigs(model_type, graphs=False), references(model_type, torch.float32)
        for grid in draw_grids(3, 6):
            rows = reference.encode(draw_pixels(rig, grid, 0), [grid])[0]
            assert rows.shape == (rig.tower.footprint(grid).tokens, rig.tower.geometry.width)


def fingerprint(folder: Path) -> str:
    checkpoint = open_checkpoint(str(folder))
    return load_tower(checkpoint, dtype=torch.float32, device=CPU, track=lambda shards, *_: shards).fingerprint
