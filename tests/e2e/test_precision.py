"""`--precision fp8`: a real server on a CPU against plain transformers in float32, and what it reports and refuses."""

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from checkpoints import Checkpoints
from published_float8 import write_float8
from reference import Array, Reference
from rigs import Rig
from servers import ServerProcess, finished, serving
from vitwire import Client, Embedding, InvalidItem, Item
from vitwire_server.core.grids import Grid
from vitwire_server.runtime.precision.choosing import Half, Reducible
from vitwire_server.runtime.precision.similarity import least_cosines

PHOTOGRAPH = Path(mpl.get_data_path()) / "sample_data" / "grace_hopper.jpg"
FLOOR = 0.99
FP8 = ("--precision", "fp8", "--graphs", "simulated", "--max-budget-tokens", "512")


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints) -> Iterator[ServerProcess]:
    with serving(checkpoints("qwen3_vl"), *FP8, "--precision-floor", str(FLOOR)) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.target) as one:
        yield one


def similarity(rows: Array, expected: Array, levels: int) -> float:
    """Of the least similar row or level."""
    return float(least_cosines(torch.as_tensor(rows), torch.as_tensor(expected), 1 + levels).min())


def test_rows_are_those_of_transformers_in_float32(
    client: Client, checkpoints: Checkpoints, references: Callable[..., Reference]
) -> None:
    reference, levels = references("qwen3_vl", torch.float32), client.model().deepstack_levels
    with Image.open(PHOTOGRAPH) as opened:
        image = opened.convert("RGB")
    inputs = Qwen2VLImageProcessorPil.from_pretrained(checkpoints("qwen3_vl"))(image, return_tensors="pt")
    photograph = (np.asarray(inputs["pixel_values"]), tuple(inputs["image_grid_thw"][0].tolist()))
    rng = np.random.default_rng(0)
    noise = [
        (rng.standard_normal((t * h * w, photograph[0].shape[1]), dtype=np.float32), (t, h, w))
        for t, h, w in ((1, 2, 2), (1, 8, 12), (2, 6, 4))
    ]
    cases = [photograph, *noise]
    items = [Item(pixels, grid, modality="image" if grid[0] == 1 else "video") for pixels, grid in cases]
    for (pixels, grid), embedding in zip(cases, client.encode(items), strict=True):
        expected = reference.encode(pixels, [grid])[0]
        assert similarity(embedding.numpy(), expected, levels) >= FLOOR
        assert similarity(embedding.numpy(), expected, levels) < 1 - 1e-5, "it is in float8"


def test_nan_in_one_item_does_not_reach_another(client: Client) -> None:
    model, rng = client.model(), np.random.default_rng(1)
    width = model.channels * model.temporal_patch_size * model.patch_size**2
    grid, patches = (1, 6, 8), 48
    good = [Item(rng.standard_normal((patches, width), dtype=np.float32), grid) for _ in range(2)]
    lost = Item(np.full((patches, width), np.nan, np.float32), grid)
    alone = [client.encode([item])[0].numpy() for item in good]
    results = dict(client.iter_encode([good[0], lost, good[1]], return_exceptions=True))
    assert isinstance(results[1], InvalidItem)
    for position, expected in zip((0, 2), alone, strict=True):
        embedding = results[position]
        assert isinstance(embedding, Embedding)
        assert similarity(embedding.numpy(), expected, model.deepstack_levels) > 0.9999


@pytest.mark.matrix
def test_what_was_measured_is_reported(client: Client, server: ServerProcess, checkpoints: Checkpoints) -> None:
    model = client.model()
    assert model.dtype == "bfloat16"
    assert model.precision is not None
    assert (model.precision.type, model.precision.layers) == ("float8_e4m3fn", 12)
    assert FLOOR <= model.precision.similarity < model.precision.median_similarity < 1
    assert server.metric("vitwire_precision_similarity") == pytest.approx(model.precision.similarity)
    logged = re.search(r"12 linear layers in float8_e4m3fn; 768 rows .* least (0\.\d+), median", server.log())
    assert logged
    assert float(logged[1]) == pytest.approx(model.precision.similarity, abs=1e-5)
    with serving(checkpoints("qwen3_vl"), "--dtype", "bfloat16") as usual, Client(usual.target) as other:
        assert other.model().precision is None
        assert other.model().weights_fingerprint != model.weights_fingerprint, "caches must not mix their rows"
        assert usual.metric("vitwire_precision_similarity") == 1


def test_a_floor_that_is_not_reached_is_an_error(checkpoints: Checkpoints) -> None:
    with serving(checkpoints("qwen3_vl"), *FP8, "--precision-floor", "0.99999", wait=False) as server:
        assert server.process.wait(60) == 2
        assert re.search(
            r"--precision-floor 0\.99999: with --precision fp8, the lowest cosine similarity to bfloat16 is "
            r"0\.99\d+ .*lower the floor",
            server.log(),
        )


def test_a_start_takes_the_blocks_that_reach_the_floor_and_each_start_the_same(
    client: Client, checkpoints: Checkpoints, references: Callable[..., Reference]
) -> None:
    """At 0.999 only some do; replays of simulated graphs give their rows, bit for bit in each process."""
    pixels, grid = np.random.default_rng(2).standard_normal((96, 3 * 2 * 16 * 16), dtype=np.float32), (1, 8, 12)
    found, flags = [], list[str]()
    for _ in range(3):  # the third time with the blocks that the first two chose
        with serving(checkpoints("qwen3_vl"), *FP8, *flags) as server, Client(server.target) as one:
            model = one.model()
            assert model.precision is not None
            assert 0 < model.precision.layers < 12
            assert model.precision.similarity >= 0.999
            logged = re.search(r"weights in float8_e4m3fn: --precision-blocks (\S+)\n", server.log())
            assert logged
            found.append((logged[1], model.weights_fingerprint, one.encode([Item(pixels, grid)])[0].numpy()))
        if len(found) == 2:
            flags = ["--precision-blocks", logged[1]]
    blocks, fingerprints, rows = zip(*found, strict=True)
    assert len({*blocks}) == 1
    assert len({*fingerprints, client.model().weights_fingerprint}) == 2, "the whole tower in float8 has another"
    assert all(np.array_equal(rows[0], each) for each in rows[1:])
    expected = references("qwen3_vl", torch.float32).encode(pixels, [grid])[0]
    assert 0.998 < similarity(rows[0], expected, 3) < 1 - 1e-5, "bfloat16 loses 1e-4 more"


def test_a_checkpoint_in_float8_is_served(
    checkpoints: Checkpoints, references: Callable[..., Reference], tmp_path: Path
) -> None:
    write_float8(checkpoints("qwen3_vl"), tmp_path / "published")
    pixels, grid = np.random.default_rng(2).standard_normal((96, 3 * 2 * 16 * 16), dtype=np.float32), (1, 8, 12)
    expected = references("qwen3_vl", torch.float32).encode(pixels, [grid])[0]
    with serving(tmp_path / "published", *FP8) as server, Client(server.target) as client:
        model = client.model()
        assert model.precision is not None
        assert model.precision.layers
        assert f"{model.precision.layers} linear layers have the float8 values and scales" in server.log()
        assert FLOOR < similarity(client.encode([Item(pixels, grid)])[0].numpy(), expected, 3) < 1 - 1e-5
    with serving(tmp_path / "published") as server, Client(server.target) as client:
        assert client.model().precision is None
        assert 0.995 < similarity(client.encode([Item(pixels, grid)])[0].numpy(), expected, 3) < 1 - 1e-5


class TestCommand:
    """`vitwire-server precision` on a folder of photographs."""

    @pytest.fixture
    def photographs(self, tmp_path: Path) -> Path:
        folder = tmp_path / "photographs"
        (folder / "inner").mkdir(parents=True)
        with Image.open(PHOTOGRAPH) as image:
            image.save(folder / "one.png")
            image.resize((160, 240)).save(folder / "inner" / "[red]two\x1b.png")
        return folder

    def judged(self, *words: object) -> tuple[int, dict[str, Any], str]:
        done = finished("precision", *map(str, words), "--json")
        return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr

    def test_it_compares_the_rows_that_transformers_pictures_give(
        self, checkpoints: Checkpoints, photographs: Path, references: Callable[..., Reference]
    ) -> None:
        folder = checkpoints("qwen3_vl")
        words = ("--model", folder, "--images", photographs, "--precision-floor", 0.9, "--float32")
        code, document, _ = self.judged(*words, "--precision-blocks", "0,mlp:2")
        assert code == 0
        assert document["passed"]
        assert document["flags"] == "--precision fp8 --precision-floor 0.9 --precision-blocks 0,mlp:2"
        exact, reduced = (Rig.of(folder, torch.bfloat16, torch.device("cpu"), sizes=()) for _ in range(2))
        blocks = Reducible(reduced.tower.blocks)
        blocks.reduce([Half(0, "attn"), Half(0, "mlp"), Half(2, "mlp")])
        reference, parts = references("qwen3_vl", torch.float32), 1 + exact.tower.geometry.levels
        processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        assert [each["file"] for each in document["photographs"]] == ["inner/[red]two\x1b.png", "one.png"]
        for found in document["photographs"]:
            with Image.open(photographs / found["file"]) as image:
                inputs = processor(image.convert("RGB"), return_tensors="pt")
            pixels, grid = inputs["pixel_values"], tuple(inputs["image_grid_thw"][0].tolist())
            one, other = (
                torch.as_tensor(rig.run([rig.item(Grid(*grid), pixels.to(torch.bfloat16))])[0]).float()
                for rig in (exact, reduced)
            )
            cosines = least_cosines(one, other, parts)
            assert found["rows"] == len(cosines)
            assert found["below"] == 0
            # our pixels are normalised in bfloat16 from bytes, theirs before they are rounded to it
            assert found["lowest"] == pytest.approx(float(cosines.min()), abs=5e-4)
            assert found["median"] == pytest.approx(float(cosines.median()), abs=1e-4)
            plain = torch.as_tensor(reference.encode(pixels, [grid])[0])
            assert found["exact_lowest"] == pytest.approx(float(least_cosines(plain, one, parts).min()), abs=2e-4)

    def test_it_fails_if_a_row_or_the_start_is_below_the_floor(
        self, checkpoints: Checkpoints, photographs: Path
    ) -> None:
        words = ("--model", checkpoints("qwen3_vl"), "--images", photographs)
        code, document, _ = self.judged(*words, "--precision-floor", 0.99999)
        assert code == 1
        assert "--precision-floor 0.99999: with --precision fp8, the lowest" in document["refusal"]
        assert document["precision"]["layers"] == 12, "what is refused is judged nevertheless"
        assert all(each["below"] for each in document["photographs"])
        assert document["flags"] == ""
        done = finished("precision", *map(str, words), "--precision-floor", "0.99")
        assert done.returncode == 0
        assert "serve with --precision fp8 --precision-floor 0.99 --precision-blocks all" in done.stdout
        assert "\x1b" not in done.stdout

    def test_damaged_files_are_named_and_skipped(self, checkpoints: Checkpoints, photographs: Path) -> None:
        whole = (photographs / "one.png").read_bytes()
        (photographs / "half.png").write_bytes(whole[: len(whole) // 2])
        (photographs / "notes.txt").write_text("none")
        os.mkfifo(photographs / "pipe")
        words = ("--model", checkpoints("qwen3_vl"), "--images", photographs, "--precision-floor", 0.9)
        code, document, log = self.judged(*words)
        assert code == 0
        assert document["skipped"].keys() == {"half.png", "notes.txt", "pipe"}
        assert document["skipped"]["notes.txt"] == "is not a JPEG, PNG, WebP, GIF or BMP image"
        assert "half.png is skipped: cannot be read as an image" in log
        for path in (photographs / "one.png", *(photographs / "inner").iterdir()):
            path.unlink()
        code, document, _ = self.judged(*words)
        assert (code, document["photographs"], document["passed"]) == (1, [], False)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--images", "/nowhere"), "--images /nowhere: expected a directory with photographs"),
            (("--images", ".", "--precision-blocks", "3-1"), "--precision-blocks 3-1: ranges must ascend"),
            (("--images", ".", "--no-such"), "unknown flag --no-such"),
            (("--images", ".", "--compile", "on"), "--precision fp8 and --compile on cannot be used together"),
        ],
    )
    def test_what_is_wrong_is_named(self, words: tuple[str, ...], message: str, checkpoints: Checkpoints) -> None:
        done = finished("precision", "--model", str(checkpoints("qwen3_vl")), *words)
        assert done.returncode == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr
