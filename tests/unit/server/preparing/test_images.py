"""Images and clips of patches, prepared, against the stock Hugging Face processors."""

import ast
import math
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as tuned
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError
from transformers.image_utils import load_image
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import PatchEmbed

from encoded_files import bomb
from prepared import clip_patches, recipe
from prepared import patches as image_patches
from vitwire_server.core.decoding import MAX_PICTURE_PIXELS
from vitwire_server.preparing.rules.patches import smart_resize
from vitwire_server.preparing.rules.recipe import Recipe

QUICK = tuned(max_examples=60)
MANY = tuned(max_examples=400)
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def package(name: str) -> Path:
    spec = find_spec(name)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


PHOTOGRAPHS = [package("matplotlib") / "mpl-data/sample_data/grace_hopper.jpg"] + [
    package("skimage") / "data" / name for name in ("astronaut.png", "coffee.png", "chelsea.png", "camera.png")
]


def preprocessor(patch: int = 14, merge: int = 2, **changes: Any) -> Recipe:
    side = patch * merge
    defaults: dict[str, Any] = {
        "temporal": 2, "min_pixels": 4 * side**2, "max_pixels": 150 * side**2,
        "mean": MEAN, "std": STD, "rescale_factor": 1 / 255, "resample": 3,
    }  # fmt: skip
    return recipe(patch=patch, merge=merge, **defaults | changes)


def loose(**changes: Any) -> Recipe:
    """Settings of small sides, under which small random pictures are both enlarged and shrunk."""
    return preprocessor(4, 2, **{"min_pixels": 256, "max_pixels": 2000, **changes})


def stock(settings: Recipe) -> Any:
    family = Glm4vImageProcessorPil if settings.settings.bounds_span_frames else Qwen2VLImageProcessorPil
    return family(
        patch_size=settings.patch,
        merge_size=settings.merge,
        temporal_patch_size=settings.temporal,
        size={"shortest_edge": settings.settings.min_pixels, "longest_edge": settings.settings.max_pixels},
        image_mean=list(settings.settings.mean),
        image_std=list(settings.settings.std),
        rescale_factor=settings.settings.rescale_factor,
        resample=settings.settings.resample,
    )


def duplicated(rows: np.ndarray, settings: Recipe) -> np.ndarray:
    """Rows of an image with the frame axis that the processor adds."""
    side = settings.patch
    frames = rows.reshape(-1, 3, 1, side, side)
    return frames.repeat(settings.temporal, axis=2).reshape(len(rows), -1)


def normalised(rows: np.ndarray, settings: Recipe) -> np.ndarray:
    """Patch rows as the server rescales and normalises them."""
    values = rows.reshape(len(rows), 3, -1) * settings.settings.rescale_factor
    mean, std = (np.asarray(value)[None, :, None] for value in (settings.settings.mean, settings.settings.std))
    result: np.ndarray = ((values - mean) / std).reshape(len(rows), -1)
    return result


def assert_as_stock(ours: Any, theirs: Any, settings: Recipe) -> None:
    rows, grid = image_patches(ours, settings)
    expected = stock(settings)(theirs, return_tensors="np")
    assert [list(grid)] == expected["image_grid_thw"].tolist()
    assert rows.dtype == np.uint8
    assert rows.flags.c_contiguous
    assert rows.shape == (math.prod(grid), 3 * settings.patch**2)
    full = duplicated(rows, settings)
    np.testing.assert_allclose(expected["pixel_values"], normalised(full, settings), rtol=0, atol=2e-6)


# -- images ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PHOTOGRAPHS, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(preprocessor(14), id="qwen2_vl"),
        pytest.param(preprocessor(16, mean=(0.5,) * 3, std=(0.5,) * 3), id="qwen3_vl"),
        pytest.param(preprocessor(16, min_pixels=800**2, max_pixels=1200**2), id="enlarged"),
        pytest.param(preprocessor(14, 1, temporal=1, resample=2), id="unmerged-bilinear"),
        *(pytest.param(preprocessor(patch, bounds_span_frames=True), id=f"glm4v-{patch}") for patch in (14, 16)),
    ],
)
def test_photographs(path: Path, settings: Recipe) -> None:
    assert_as_stock(path, load_image(str(path)), settings)
    assert_as_stock(str(path), str(path), settings)


sides = st.integers(5, 70)


@given(data=st.data(), height=sides, width=sides, channels=st.sampled_from([1, 3, 4]), first=st.booleans())
@QUICK
def test_arrays(data: st.DataObject, height: int, width: int, channels: int, first: bool) -> None:
    shape = (channels, height, width) if first else (height, width, channels)
    seed = data.draw(st.integers(0, 2**32 - 1))
    image = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    assert_as_stock(image, image, loose())


def test_every_alpha_on_white() -> None:
    alpha, value = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    image = np.stack([value, value, value, alpha], axis=-1)
    assert_as_stock(image, image, loose(max_pixels=2**20))


@given(height=sides, width=sides)
@QUICK
def test_gray_arrays_and_views(height: int, width: int) -> None:
    gray = np.random.default_rng(height).integers(0, 256, (height, width), np.uint8)
    assert_as_stock(gray, Image.fromarray(gray), loose())
    assert_as_stock(gray[::-1, ::2], gray[::-1, ::2, None].copy(), loose())


def test_an_array_with_channels_first_where_both_would_do() -> None:
    image = np.random.default_rng(0).integers(0, 256, (4, 40, 3), np.uint8)
    assert_as_stock(image, image, loose(min_pixels=1))


def test_arrays_are_left_as_they_are() -> None:
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 4), np.uint8)
    image.flags.writeable = False
    for settings in (loose(), loose(max_pixels=10**5)):
        image_patches(image, settings)


def noise(mode: str) -> Image.Image:
    values = np.random.default_rng(1).integers(0, 256, (50, 37, 4), np.uint8)
    if mode in {"I;16", "I", "F"}:
        wide = values[..., :2].copy().view(np.uint16)[..., 0]
        return Image.fromarray(wide.astype({"I;16": np.uint16, "I": np.int32, "F": np.float32}[mode]))
    if mode == "LAB":
        profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
        lab = ImageCms.profileToProfile(Image.fromarray(values[..., :3]), *profiles, outputMode="LAB")
        assert lab is not None
        return lab
    return Image.fromarray(values).convert("RGB" if mode in {"HSV", "YCbCr", "CMYK"} else "RGBA").convert(mode)


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB", "I", "I;16", "F"]
)
def test_modes_of_pillow(mode: str) -> None:
    try:
        image = noise(mode)
        image.convert("RGB")
    except ValueError:
        with pytest.raises(ValueError, match="cannot be read"):
            image_patches(image, loose())
    else:
        assert_as_stock(image, image.copy(), loose())


def first_colour(image: Image.Image) -> Any:
    return image.getpixel((0, 0))


@pytest.mark.parametrize("mode", ["P", "L", "RGB", "palette"])
def test_a_transparent_colour(mode: str) -> None:
    image = noise("P" if mode == "palette" else mode)
    image.info["transparency"] = bytes(range(256)) if mode == "palette" else first_colour(image)
    assert_as_stock(image, image.copy(), loose())


FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "rgba.png": ("RGBA", {}),
    "gray.png": ("L", {}),
    "gray-alpha.png": ("LA", {}),
    "bilevel.png": ("1", {}),
    "deep.png": ("I;16", {}),
    "palette.png": ("P", {"transparency": bytes(range(256))}),
    "keyed-palette.png": ("P", {"transparency": first_colour}),
    "keyed.gif": ("P", {"transparency": first_colour}),
    "keyed-gray.png": ("L", {"transparency": first_colour}),
    "keyed.png": ("RGB", {"transparency": first_colour}),
    "cmyk.jpg": ("CMYK", {}),
    "gray.jpg": ("L", {}),
    "photo.webp": ("RGB", {}),
    "photo.bmp": ("RGB", {}),
}


@pytest.mark.parametrize("name", FILES)
def test_files(name: str, tmp_path: Path) -> None:
    mode, options = FILES[name]
    image = noise(mode)
    image.save(tmp_path / name, **{key: value(image) if callable(value) else value for key, value in options.items()})
    with Image.open(tmp_path / name) as theirs:  # `load_image` would drop an alpha channel
        assert_as_stock(tmp_path / name, theirs, loose())


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "avif"])
def test_files_and_images_are_turned_upright_but_arrays_are_not(orientation: int, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"turned.{suffix}"
    exif = Image.Exif()
    exif[0x0112] = orientation
    noise("RGB").save(path, exif=exif)
    assert_as_stock(path, str(path), loose())
    upright, turned = image_patches(path, loose())
    with Image.open(path) as image:
        assert_as_stock(image, ImageOps.exif_transpose(image), loose())
        own, own_grid = image_patches(image, loose())
        rows, grid = image_patches(np.asarray(image), loose())
    assert own_grid == turned
    np.testing.assert_array_equal(own, upright)
    assert (turned == (1, grid[2], grid[1])) is (orientation > 4)
    assert (upright.shape == rows.shape and bool((upright == rows).all())) is (orientation == 1)


# -- sizes -----------------------------------------------------------------------------------------


def stock_function(source: str, *names: str) -> Callable[..., Any]:
    """A function (or a method, by class and name) of a source file that cannot be imported here."""
    tree: ast.AST = ast.parse((package("transformers") / "models" / source).read_text("utf-8"))
    for name in names:
        tree = next(node for node in ast.iter_child_nodes(tree) if getattr(node, "name", None) == name)
    assert isinstance(tree, ast.FunctionDef)
    scope: dict[str, Any] = {"math": math, "torch": torch}
    exec(compile(ast.Module([tree], []), source, "exec"), scope)
    return scope[names[-1]]


QWEN2, QWEN3 = "qwen2_vl/video_processing_qwen2_vl.py", "qwen3_vl/video_processing_qwen3_vl.py"
resize_qwen2 = stock_function(QWEN2, "smart_resize")
resize_qwen3 = stock_function(QWEN3, "smart_resize")
lengths = st.one_of(st.integers(1, 64), st.integers(1, 6000))
patches = st.sampled_from([(14, 2), (16, 2), (16, 1), (14, 4)])
areas = st.tuples(st.integers(1, 10**6), st.integers(1, 10**7))


def outcome(call: Callable[[], tuple[int, int]]) -> tuple[int, int] | type[Exception]:
    try:
        return call()
    except ValueError:
        return ValueError


@pytest.mark.parametrize("spans", [False, True])
@given(st.tuples(st.integers(1, 40), lengths, lengths), st.integers(1, 4), patches, areas)
@MANY
def test_smart_resize(
    spans: bool, clip: tuple[int, int, int], group: int, patch: tuple[int, int], area: tuple[int, int]
) -> None:
    frames, height, width = clip
    limits = {"min_pixels": area[0], "max_pixels": area[1]}
    settings = preprocessor(*patch, temporal=group, bounds_span_frames=spans, **limits)
    ours = outcome(lambda: smart_resize(height, width, settings, frames))
    resize = partial(resize_qwen3, frames, temporal_factor=group) if spans else resize_qwen2
    assert ours == outcome(lambda: resize(height, width, factor=settings.factor, **limits))


@pytest.mark.parametrize("spans", [False, True])
def test_the_longest_picture(spans: bool) -> None:
    settings = preprocessor(bounds_span_frames=spans)
    smart_resize(6000, 30, settings, frames=2)
    with pytest.raises(ValueError, match=r"6001x30 is too elongated: the maximum aspect ratio is 200"):
        smart_resize(6001, 30, settings, frames=2)


# -- clips -----------------------------------------------------------------------------------------


def film(frames: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(frames).integers(0, 256, (frames, height, width, 3), np.uint8)


@pytest.mark.parametrize("patchify", [
    stock_function(QWEN2, "Qwen2VLVideoProcessor", "patchify"),
    stock_function(QWEN3, "Qwen3VLVideoProcessor", "patchify"),
])  # fmt: skip
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 3)),
    st.integers(1, 4),
    st.sampled_from([(4, 2), (5, 3), (14, 2), (14, 3), (16, 1), (16, 2)]),
)
@QUICK
def test_rows_of_a_clip(
    patchify: Callable[..., Any], size: tuple[int, int, int], group: int, patch: tuple[int, int]
) -> None:
    (frames, high, wide), (side, merge) = size, patch
    clip = film(frames, high * side * merge, wide * side * merge)
    rows, grid = clip_patches(clip, preprocessor(side, merge, temporal=group, min_pixels=1, max_pixels=10**6))
    video = torch.from_numpy(clip).permute(0, 3, 1, 2)[None]
    expected, *stock_grid = patchify(None, video, side, merge, group)
    assert list(grid) == stock_grid == [-(-frames // group), high * merge, wide * merge]
    assert rows.flags.c_contiguous
    np.testing.assert_array_equal(rows, expected[0].numpy())


@pytest.mark.parametrize("patch", [14, 16])
def test_rows_are_what_the_stock_convolution_reads(patch: int) -> None:
    embed = PatchEmbed(patch_size=patch, temporal_patch_size=2, in_channels=3, embed_dim=8).double()
    clip = film(4, patch * 4, patch * 6)
    rows, (t, h, w) = clip_patches(clip, preprocessor(patch, min_pixels=1))
    with torch.no_grad():
        by_rows = embed(torch.from_numpy(rows).double())
        whole = embed.proj(torch.from_numpy(clip).double().permute(3, 0, 1, 2)[None])[0]  # (E, t, h, w)
    by_merge = whole.reshape(8, t, h // 2, 2, w // 2, 2).permute(1, 2, 4, 3, 5, 0)
    torch.testing.assert_close(by_rows, by_merge.reshape(t * h * w, 8))


@pytest.mark.parametrize("patch", [14, 16])
@pytest.mark.parametrize("path", PHOTOGRAPHS[:3], ids=lambda path: path.stem)
def test_a_still_clip_is_its_image_twice(patch: int, path: Path) -> None:
    settings = preprocessor(patch)
    image, grid = image_patches(path, settings)
    with Image.open(path) as opened:
        clip, clip_grid = clip_patches([opened, opened.copy()], settings)
    assert grid == clip_grid
    np.testing.assert_array_equal(clip, duplicated(image, settings))


@pytest.mark.parametrize("spans", [False, True])
def test_frames_are_resized_as_images_are(spans: bool) -> None:
    settings = loose(bounds_span_frames=spans, max_pixels=9000)
    clip = film(5, 70, 90)
    rows, (t, h, w) = clip_patches(clip, settings)
    assert (t, h * 4, w * 4) == (3, *smart_resize(70, 90, settings, 5))
    assert (h * w * 16 * 4 <= 9000) is spans
    exact = loose(min_pixels=h * w * 16, max_pixels=h * w * 16)
    by_frame = rows.reshape(t, h * w, 3, 2, 4, 4)
    for index in range(6):
        frame = Image.fromarray(clip[min(index, 4)]).resize((w * 4, h * 4), Image.Resampling.BICUBIC)
        alone, _ = image_patches(frame, exact)
        np.testing.assert_array_equal(by_frame[index // 2, :, :, index % 2].reshape(h * w, -1), alone)


def test_sequences_of_frames() -> None:
    clip = film(3, 40, 56)
    expected, grid = clip_patches(clip, loose())
    images = [Image.fromarray(frame) for frame in clip]
    for frames in (list(clip), tuple(images), [clip[0], images[1], clip[2].transpose(2, 0, 1)]):
        rows, same = clip_patches(frames, loose())
        assert same == grid
        np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(clip_patches(clip.transpose(0, 3, 1, 2), loose())[0], expected)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((8, 8, 3), np.float32), "expected an array of uint8, values 0 to 255, got float32"),
        (np.zeros((8, 8), np.bool_), "got bool"),
        (np.zeros((0, 8, 3), np.uint8), r"got \(0, 8, 3\)"),
        (np.zeros((8, 0), np.uint8), r"got \(8, 0\)"),
        (np.zeros((8, 8, 2), np.uint8), r"expected an image \(H, W\).* of 1, 3 or 4 channels, got \(8, 8, 2\)"),
        (np.zeros(8, np.uint8), r"got \(8,\)"),
        (np.zeros((2, 8, 8, 3), np.uint8), r"got \(2, 8, 8, 3\)"),
        (np.zeros((300, 1, 3), np.uint8), "300x1 is too elongated: the maximum aspect ratio is 200"),
        (Image.new("RGB", (1, 201)), "201x1 is too elongated"),
        (Image.new("RGB", (0, 5)), "at least one pixel"),
    ],
)
def test_bad_images(image: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        image_patches(image, preprocessor())


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (np.zeros((8, 8, 3), np.uint8), r"expected frames of shape \(F, H, W, 3\), got \(8, 8, 3\)"),
        (np.zeros((0, 8, 8, 3), np.uint8), "at least one frame"),
        ([], "at least one frame"),
        (np.zeros((2, 8, 8, 3)), "uint8"),
        ([np.zeros((8, side), np.uint8) for side in (8, 9)], r"one size, got \(8, 8\) and, at 1, \(8, 9\)"),
        (np.zeros((1, 8, 8, 3), np.uint8), "at least 2 frames, got 1"),
    ],
)
def test_bad_clips(frames: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clip_patches(frames, preprocessor(bounds_span_frames=True))


def test_other_types() -> None:
    with pytest.raises(TypeError, match="expected a Pillow image or a uint8 array, got list"):
        image_patches([[0]], preprocessor())
    for frames in ("clip.mp4", Path("clip.mp4"), Image.new("RGB", (8, 8))):
        with pytest.raises(TypeError, match="expected an array or a sequence of frames"):
            clip_patches(frames, preprocessor())


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9])
@pytest.mark.parametrize("suffix", ["jpg", "png", "gif", "tiff", "webp", "bmp"])
def test_truncated_files(suffix: str, share: float, tmp_path: Path) -> None:
    path = tmp_path / f"cut.{suffix}"
    noise("RGB").save(path)
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * share)])
    with pytest.raises(Exception, match=r"\w"):  # libraries raise anything over broken files
        image_patches(path, loose())


def test_files_that_are_no_images(tmp_path: Path) -> None:
    with pytest.raises(UnidentifiedImageError):
        image_patches(__file__, loose())
    with pytest.raises(FileNotFoundError, match="missing"):
        image_patches(tmp_path / "missing.png", loose())
    with pytest.raises(IsADirectoryError):
        image_patches(tmp_path, loose())


def test_truncated_images_opened_by_the_caller(tmp_path: Path) -> None:
    path = tmp_path / "cut.png"
    noise("RGB").save(path)
    path.write_bytes(path.read_bytes()[:-1000])
    with Image.open(path) as image, pytest.raises(ValueError, match="the image cannot be read"):
        image_patches(image, loose())


@pytest.mark.parametrize("action", ["error", "ignore", None])
@pytest.mark.parametrize("side", [9_500, 20_000])
def test_decompression_bombs(side: int, action: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Pillow has no limit."""
    message = r"exceeds .*limit of \d+ pixels"
    if action is None:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
        message = f"{side}x{side} exceeds the limit of {MAX_PICTURE_PIXELS} pixels"
    path = tmp_path / "bomb.png"
    path.write_bytes(bomb(side, side))
    with warnings.catch_warnings():
        warnings.simplefilter(action or "error", Image.DecompressionBombWarning)
        with pytest.raises(Exception, match=message):
            image_patches(path, loose())


def test_programs_are_not_run(tmp_path: Path) -> None:
    """Pillow would run EPS in Ghostscript."""
    path = tmp_path / "endless.eps"
    path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n{} loop\n")
    with pytest.raises(UnidentifiedImageError):
        image_patches(path, loose())
