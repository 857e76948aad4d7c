"""The kernel that prepares pictures: Pillow's bytes, and rows as torch normalises them, bit for bit.

`make kernel-test` runs the same tests on a CPU, in Triton's interpreter.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton

from prepared import MODELS, recipe, tiled
from vitwire_server.core.items import Modality
from vitwire_server.core.models import Geometry
from vitwire_server.core.tilings import Tiling, TilingRule
from vitwire_server.preparing import pillow
from vitwire_server.preparing.device import checks, colours, kernels, passes, planes, resizing
from vitwire_server.preparing.device.passes import program
from vitwire_server.preparing.device.resizing import Job, prepare, prepared
from vitwire_server.preparing.rules.recipe import Recipe
from vitwire_server.runtime.staging import Stager

SMALL = ((40, 30), (31, 90), (80, 64))
"""Of pictures that the interpreter prepares in a second."""
GUARD = 7.0


@pytest.fixture(autouse=True)
def where(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cuda":
        return
    if not triton.knobs.runtime.interpret:
        pytest.skip("a CPU runs Triton's kernels only in its interpreter: make kernel-test")
    monkeypatch.setattr(resizing, "follower", lambda _: kernels.follow)
    monkeypatch.setattr(checks, "PROBES", SMALL)
    monkeypatch.setattr(kernels, "_BLOCK", (64, 256))  # programs run one after the other


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest, device: torch.device) -> Any:
    if request.param is torch.bfloat16 and device.type == "cpu":
        pytest.skip("the interpreter has no bfloat16 of its own")
    return request.param


def drawn(*shape: int) -> np.ndarray:
    rng = np.random.default_rng(shape[-2])
    return np.where(rng.random(shape) < 0.5, rng.integers(0, 256, shape), rng.choice([0, 255], shape)).astype(np.uint8)


def assert_bytes(picture: np.ndarray, own: Recipe, device: torch.device) -> None:
    expected = pillow.prepared(picture, own)
    pixels, _ = prepared(torch.from_numpy(picture).to(device), own)
    np.testing.assert_array_equal(pixels.cpu().numpy(), expected.pixels.reshape(len(expected.pixels), -1))


@pytest.mark.parametrize("name", MODELS)
def test_every_rule(name: str, device: torch.device) -> None:
    floats = torch.float32 if device.type == "cpu" else torch.bfloat16
    assert checks.fault_of(MODELS[name], device, floats) == ""


def test_extreme_shapes(device: torch.device) -> None:
    own = tiled(Tiling(TilingRule.STRETCH, (30, 17)), resample=1)
    for size in ((1, 1), (1, 300), (300, 1), (2, 90), (30, 400), (200, 17), (31, 16)):
        assert_bytes(drawn(*size, 3), own, device)


def test_blocks_of_the_kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Canvases end within blocks, and blocks within cells."""
    monkeypatch.setattr(kernels, "_BLOCK", (8, 64))
    for tile in ((17, 65), (8, 64), (7, 129)):
        assert_bytes(drawn(20, 70, 3), tiled(Tiling(TilingRule.SQUARE, tile, background=(1, 2, 3))), device)
        assert_bytes(drawn(20, 70, 3), tiled(Tiling(TilingRule.STRETCH, tile)), device)


@pytest.mark.parametrize(("source", "most"), [((1080, 1920), 1344 * 768), ((3024, 4032), 1184 * 864)])
def test_photographs(source: tuple[int, int], most: int, device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("the interpreter would take minutes")
    assert_bytes(drawn(*source, 3), recipe(patch=16, merge=2, temporal=2, max_pixels=most), device)


# -- rows of the tower's input -----------------------------------------------------------------------

UNLIKE = {"mean": (0.48, 0.45, 0.41), "std": (0.27, 0.26, 0.28)}
PATCHES = recipe(patch=8, merge=2, temporal=2, min_pixels=32**2, max_pixels=64**2, **UNLIKE)
RASTER = recipe(patch=8, temporal=1, raster=True, channels_last=True, min_pixels=32**2, max_pixels=64**2, **UNLIKE)
CROPPED = recipe(
    tiling=Tiling(TilingRule.SQUARE, (16, 16), background=(9, 8, 7), crop=(24, 24), crop_background=(1, 2, 3)),
    crop_mean=(0.1, 0.2, 0.3), crop_std=(0.4, 0.5, 0.6), **UNLIKE,
)  # fmt: skip


def staged(picture: np.ndarray, own: Recipe, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Rows as a server stages what Pillow prepared."""
    made = pillow.prepared(picture, own)
    channels_last = own.channels_last
    tiling = own.settings.tiling
    geometry = Geometry(own.patch, own.merge, own.temporal, 3, 8, 0, channels_last=channels_last)
    stager = Stager(geometry, {Modality.IMAGE: own.settings}, torch.device("cpu"))
    columns = 3 * own.temporal * own.patch**2 if tiling is None else made.pixels[0].size
    rows = torch.empty(len(made.pixels), columns, dtype=dtype)
    stager.stage(torch.from_numpy(made.pixels).view(-1), Modality.IMAGE, rows)
    if made.crops is None:
        return rows, None
    crops = torch.empty(len(made.crops), made.crops[0].size, dtype=dtype)
    stager.stage(torch.from_numpy(made.crops).view(-1), Modality.IMAGE, crops, crops=True)
    return rows, crops


def input_of(expected: list[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """A tower's input with rows for each, and one more before and after them."""
    counts = [len(each) for each in expected]
    whole = torch.full((sum(counts) + 2, expected[0].shape[1]), GUARD, dtype=expected[0].dtype, device=device)
    return whole, list(whole[1:-1].split(counts))


def assert_written(whole: Tensor, expected: list[Tensor]) -> None:
    assert (whole[0] == GUARD).all()
    assert (whole[-1] == GUARD).all()
    assert torch.equal(whole[1:-1].cpu(), torch.cat(expected))


def test_a_batch_of_patches(device: torch.device, dtype: torch.dtype) -> None:
    """Images and clips of several sizes, one that keeps its size among them: frames are doubled, the last repeated."""
    pictures = [drawn(50, 70, 3), drawn(48, 64, 3), drawn(3, 40, 30, 3), drawn(2, 30, 64, 3)]
    expected = [staged(each, PATCHES, dtype)[0] for each in pictures]
    whole, rows = input_of(expected, device)
    prepare([Job(torch.from_numpy(p).to(device), PATCHES, own) for p, own in zip(pictures, rows, strict=True)])
    assert_written(whole, expected)


def test_channels_last(device: torch.device, dtype: torch.dtype) -> None:
    expected = [staged(drawn(50, 70, 3), RASTER, dtype)[0]]
    whole, rows = input_of(expected, device)
    prepare([Job(torch.from_numpy(drawn(50, 70, 3)).to(device), RASTER, rows[0])])
    assert_written(whole, expected)


def test_crops_are_normalised_by_their_own_settings(device: torch.device, dtype: torch.dtype) -> None:
    pictures = [drawn(50, 70, 3), drawn(33, 20, 3)]
    expected = [staged(each, CROPPED, dtype) for each in pictures]
    whole, rows = input_of([pixels for pixels, _ in expected], device)
    cropped = [crops for _, crops in expected if crops is not None]
    second, crops = input_of(cropped, device)
    prepare(
        [
            Job(torch.from_numpy(picture).to(device), CROPPED, own, own_crops)
            for picture, own, own_crops in zip(pictures, rows, crops, strict=True)
        ]
    )
    assert_written(whole, [pixels for pixels, _ in expected])
    assert_written(second, cropped)


def test_scratch_is_used_again(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = drawn(4, 50, 70, 3)
    monkeypatch.setattr(resizing, "_SCRATCH_BYTES", 1)
    assert_bytes(clip, PATCHES, device)
    launches: list[int] = []
    follow = resizing.follower(device)
    counted = lambda table, *rest: (launches.append(len(table)), follow(table, *rest))  # noqa: E731
    monkeypatch.setattr(resizing, "follower", lambda _: counted)
    prepared(torch.from_numpy(clip).to(device), PATCHES)
    assert launches == [1] * 8
    launches.clear()
    monkeypatch.setattr(resizing, "_SCRATCH_BYTES", 1 << 20)
    prepared(torch.from_numpy(clip).to(device), PATCHES)
    assert launches == [4, 4], "one launch for each pass of all frames"


def test_nothing_waits_for_the_device(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("needs CUDA")
    picture = torch.from_numpy(drawn(50, 70, 3)).to(device)
    rows = torch.empty_like(prepared(picture, PATCHES, torch.bfloat16)[0])
    prepare([Job(picture, PATCHES, rows)])  # compiled, and its tables are there
    other = torch.from_numpy(drawn(90, 40, 3)).to(device)
    more = torch.empty_like(prepared(other[:80], PATCHES, torch.bfloat16)[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        prepare([Job(picture, PATCHES, rows), Job(other[:80], PATCHES, more)])
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -- what is not equal -------------------------------------------------------------------------------


def test_another_order_is_found(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_CHOOSES_ORDER", not passes._CHOOSES_ORDER)
    monkeypatch.setattr(checks, "PROBES", ((300, 40),))
    program.cache_clear()
    try:
        assert "300x40 differs from what Pillow" in checks.fault_of({Modality.IMAGE: PATCHES}, device, torch.float32)
    finally:
        program.cache_clear()


def test_another_normalisation_is_found(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    affine = resizing._affine
    monkeypatch.setattr(resizing, "_affine", lambda *own: affine(*own).nextafter(affine(*own) + 1))
    fault = checks.fault_of({Modality.IMAGE: PATCHES}, device, torch.float32)
    assert fault.endswith("is normalised in another way than torch does it")


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("matrix", colours._MATRICES)
def test_planes_are_converted_as_by_torch(matrix: int, full: bool, device: torch.device) -> None:
    own, (height, width) = colours.Colours(matrix, full), (6, 35 + matrix)
    samples = torch.from_numpy(drawn(height, width + 2, 1)[..., 0]), torch.from_numpy(drawn(height // 2, width, 2))
    luma, chroma = (each.to(device)[:, : -(-width // 2) if each.ndim > 2 else width] for each in samples)
    made = torch.zeros(height, width, 3, dtype=torch.uint8, device=device)
    planes.convert(luma, chroma, colours._factors(own), made)
    assert torch.equal(made.cpu(), colours.rgb(luma.cpu(), chroma.cpu(), own))
