"""Items that carry files, through real servers of one process and with edges."""

import io
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from transformers import AutoImageProcessor

from checkpoints import Checkpoints
from encoded_files import HOSTILE, clip, frames_of, jpeg_of_size, moving, photograph, saved, sound, turned
from entered import entered
from prepared import clip_items, image_items, of_clips, of_images
from references import reference_of
from servers import ServerProcess, finished, serving
from vitwire import Accepted, AsyncClient, Client, Embedding, InvalidItem, Item, NotCached, Stored, VitwireError
from vitwire_server.preparing.rules.recipe import Recipe
from vitwire_server.preparing.rules.sampling import sampled

FLAGS = ("--dtype", "float32", "--cache-bytes", "50000000", "--max-encoded-bytes", "2000000")
SHAPES = {"one process": (), "edges": ("--rpc-processes", "2", "--decode-processes", "2")}


@pytest.fixture(
    scope="module",
    params=[each if "edges" in each else pytest.param(each, marks=pytest.mark.matrix) for each in SHAPES],
)
def server(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Iterator[ServerProcess]:
    with serving(checkpoints("qwen3_vl"), *FLAGS, *SHAPES[request.param]) as process:
        yield process
        assert process.metric("vitwire_admitted_bytes") == 0
        assert process.metric("vitwire_admitted_items") == 0


client = entered(lambda server: Client(server.target), scope="function")


def assert_same(one: Embedding, other: Embedding) -> None:
    """The rows of equal pixels. Packed with other neighbours, the products of float32 may round differently."""
    assert one.grid == other.grid
    np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=0, atol=1e-5)


def results_of(client: Client, items: list[Item], *, stream: bool) -> dict[int, Embedding | VitwireError]:
    """Each item's own result. A request of one message has them too, but the client raises the first error."""
    if stream:
        return dict(client.iter_encode(items, return_exceptions=True))
    found: dict[int, Embedding | VitwireError] = {}
    try:
        found.update(client.iter_encode(items))
    except VitwireError as error:
        assert error.item is not None
        found[error.item] = error
    return found


def decoders(server: ServerProcess) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return [child for child in children if "vitwire_server.preparing.files.worker" in child.cmdline()]


def test_the_model_says_what_is_decoded(client: Client) -> None:
    model = client.model()
    assert model.encodings[4:] == ("bmp", "tiff", "ico", "jpeg2000", "avif", "mp4", "webm", "avi", "mpeg_ts")
    assert model.prepared == ("image", "video")
    assert len(model.preparation_fingerprint) == 64
    assert (model.limits.encoded_bytes, model.limits.encoded_pixels) == (2_000_000, 1 << 26)


def test_files_are_encoded_as_their_pixels_are(client: Client, tmp_path: Path) -> None:
    photo = photograph(230, 310)
    files = [saved(photo, quality=85), saved(photo, "PNG"), saved(photo, "WEBP"), turned("JPEG")]
    files += [saved(photograph(60 + 7 * index, 90), quality=80) for index in range(20)]
    (tmp_path / "photo").write_bytes(files[0])
    own = client.encode_images(files)
    for one, other in zip(client.encode([Item(encoded=file) for file in files]), own, strict=True):
        assert_same(one, other)
        assert one.report.grid == other.grid
    assert_same(client.encode([Item.from_file(tmp_path / "photo")])[0], own[0])
    streamed = dict(client.iter_encode([Item(encoded=bytearray(file)) for file in files], return_exceptions=True))
    for index, each in enumerate(own):
        assert_same(streamed[index], each)


@pytest.mark.parametrize("stream", [True, False])
def test_invalid_files_fail_alone(client: Client, server: ServerProcess, stream: bool) -> None:
    photo = photograph(64, 96)
    names = ("nonsense", "truncated jpeg", "bomb", "heic")
    pixels, good = client.encode_images([photo, saved(photo)])
    failures = server.metric("vitwire_decode_failures_total")
    for name in names if stream else names[:2]:
        items = [Item(encoded=saved(photo)), Item(encoded=HOSTILE[name][0]()), Item.from_image(photo)]
        results = results_of(client, items, stream=stream)
        assert_same(results[0], good)
        assert_same(results[2], pixels)
        error = results[1]
        assert isinstance(error, InvalidItem)
        assert error.item == 1
        assert [violation.field for violation in error.violations] == ["items[1].encoded"]
        assert HOSTILE[name][2] in str(error)
    assert server.metric("vitwire_decode_failures_total") == failures + (4 if stream else 2)


def test_sizes_are_checked_before_decoding(client: Client) -> None:
    results = results_of(client, [Item(encoded=bytes(2_000_001)), Item(encoded=jpeg_of_size(60_000, 200))], stream=True)
    assert "items[0].encoded: has 2000001 bytes, at most 2000000 are accepted" in str(results[0])
    assert isinstance(results[1], InvalidItem)


def frames_used(file: bytes, total: int, recipe: Recipe) -> tuple[list[int], np.ndarray]:
    """The frames that the model's rule chooses of a clip at 10 frames per second: their indices, and themselves."""
    assert recipe.settings.sampling
    indices = sampled(total, 10.0, recipe.settings.sampling, recipe.temporal)
    return indices, np.stack(frames_of(file, indices))


def test_clips_are_sampled_by_the_rule_of_the_model(client: Client, checkpoints: Checkpoints) -> None:
    file = clip(moving(30), 10.0)
    recipe = of_clips(checkpoints("qwen3_vl"))
    indices, frames = frames_used(file, 30, recipe)
    assert len(indices) == 6
    (own,) = client.encode_clips([frames])
    (one,) = client.encode([Item(encoded=file, modality="video")])
    assert_same(one, own)
    assert one.report.frame_seconds == pytest.approx([index / 10 for index in indices])
    (patches,) = clip_items([frames], recipe)
    assert patches.grid == own.grid
    pruned = replace(patches, keep_ratio=0.5)
    of_file = Item(encoded=file, modality="video", keep_ratio=0.5)
    assert_same(client.encode([of_file])[0], client.encode([pruned])[0])
    with pytest.raises(InvalidItem, match="has no video"):
        client.encode([Item(encoded=sound(), modality="video")])


def test_a_request_chooses_the_frames_of_a_clip(client: Client) -> None:
    """Any, an odd number of them too; under the same name of a file, the cache has each choice by itself."""
    file, rows = clip(moving(30), 10.0), []
    for indices in ([0, 1, 29], [0, 1, 28], [7, 9]):
        (own,) = client.encode_clips([np.stack(frames_of(file, indices))])
        for _ in range(2):
            (one,) = client.encode([Item(encoded=file, modality="video", options={"frames": indices})])
            assert_same(one, own)
            assert one.report.frame_seconds == pytest.approx([index / 10 for index in indices])
        rows.append(one.numpy())
    assert not np.array_equal(rows[0], rows[1])
    with pytest.raises(InvalidItem, match=r"items\[0\]\.encoded: has 30 frames, and options\.frames asks for frame 30"):
        client.encode([Item(encoded=file, modality="video", options={"frames": [2, 30]})])
    assert "frames" in client.model().options


def test_a_stored_clip_comes_with_the_seconds_of_its_frames(client: Client) -> None:
    """In every answer, so that whoever lays out a prompt need not wait for the rows."""
    item = Item(encoded=clip(moving(30), 10.0), modality="video", content_id="a clip")
    accepted, stored = (answer for _, answer in client.iter_store([item]))
    (again,) = client.store([item])
    assert isinstance(accepted, Accepted)
    assert isinstance(stored, Stored)
    assert accepted.frame_seconds == stored.report.frame_seconds == again.report.frame_seconds
    assert (len(accepted.frame_seconds), again.report.path) == (6, "cache")


def test_files_to_store_are_accepted_before_they_are_decoded(checkpoints: Checkpoints) -> None:
    """Who waits for the grid alone does not wait for a decoder, which takes longer than the tower here."""
    photo = photograph(2000, 3000)
    files = [Item(encoded=saved(photo, "WEBP", quality=60 + each), content_id=f"slow {each}") for each in range(4)]
    with serving(checkpoints("clip"), *FLAGS, "--decode-processes", "1") as server, Client(server.target) as client:
        kinds = [type(answer) for _, answer in client.iter_store(files)]
    assert kinds == [Accepted] * 4 + [Stored] * 4


def test_cached_files_are_not_decoded_again(client: Client, server: ServerProcess) -> None:
    item = Item(encoded=saved(photograph(96, 64), quality=77), content_id="a photograph")
    (first,) = client.encode([item])
    decoded = server.metric("vitwire_decode_seconds_count")
    (again,) = client.encode([item])
    assert (first.report.path, again.report.path) == ("eager", "cache")
    assert again.report.grid == first.report.grid
    assert_same(first, again)
    (named,) = client.encode([Item(content_id="a photograph")])
    assert_same(named, first)
    assert_same(client.encode_cached([item])[0], first)
    assert server.metric("vitwire_decode_seconds_count") == decoded
    other = Item(encoded=saved(photograph(96, 64), quality=76), content_id="another photograph")
    with pytest.raises(NotCached):
        client.encode([Item(content_id="another photograph")])
    assert client.encode_cached([other])[0].report.path == "eager"


def test_killed_decoders_are_replaced(client: Client, server: ServerProcess) -> None:
    file = saved(photograph(100, 100))
    client.encode([Item(encoded=file)])
    running = decoders(server)
    assert running
    for each in running:
        each.kill()
    psutil.wait_procs(running, 10)
    for quality in (71, 72, 73, 74):
        client.encode([Item(encoded=saved(photograph(100, 100), quality=quality))])


@pytest.mark.matrix
def test_decoders_do_not_load_torch_and_end_with_the_server(checkpoints: Checkpoints) -> None:
    with serving(checkpoints("qwen3_vl"), *FLAGS) as server, Client(server.target) as client:
        client.encode([Item(encoded=saved(photograph(100, 100)))])
        running = decoders(server)
        assert running
        for decoder in running:
            assert "libtorch" not in Path(f"/proc/{decoder.pid}/maps").read_text()
            kept = {name for name in decoder.environ() if name.startswith(("VITWIRE", "HF_"))}
            assert kept == {"VITWIRE_PARENT_PID"}
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        assert not psutil.wait_procs(running, 10)[1]


@pytest.mark.matrix
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "model_type", ["gemma4", "internvl", "smolvlm", "llava_onevision", "deepseek_vl_hybrid", "qwen2_5_vl"]
)
def test_every_layout(checkpoints: Checkpoints, model_type: str, shape: str) -> None:
    photo = photograph(230, 310)
    files = [*(saved(photo, each) for each in ("JPEG", "PNG", "WEBP")), turned("PNG")]
    files.append(saved(photo.convert("RGBA"), "PNG"))
    folder = checkpoints(model_type)
    with serving(folder, *FLAGS, *SHAPES[shape]) as server, Client(server.target) as client:
        encoded = client.encode([Item(encoded=file) for file in files])
        for one, other in zip(encoded, client.encode_images(files), strict=True):
            assert_same(one, other)
        for own in client.encode_images([photo, np.asarray(photo)]):
            assert_same(own, client.encode(image_items([photo], of_images(folder)))[0])
        if "mp4" in client.model().encodings:
            file = clip(moving(40), 10.0)
            _, frames = frames_used(file, 40, of_clips(folder))
            (own,) = client.encode_clips([frames])
            assert_same(client.encode([Item(encoded=file, modality="video")])[0], own)


async def test_files_are_sent_as_they_are(client: Client, server: ServerProcess, tmp_path: Path) -> None:
    photo = photograph(320, 320)
    path = tmp_path / "photo.jpg"
    path.write_bytes(saved(photo, quality=80))
    before = server.metric("vitwire_received_bytes_total")
    own = client.encode_images([path, path.read_bytes(), io.BytesIO(path.read_bytes())])
    assert server.metric("vitwire_received_bytes_total") - before < 3 * path.stat().st_size + 1000
    for each in own[1:]:
        assert_same(each, own[0])
    async with AsyncClient(server.target) as same:
        assert_same((await same.encode_images([path]))[0], own[0])
    with pytest.raises(InvalidItem, match="format is unknown, the server decodes jpeg, png, webp, gif, bmp, "):
        client.encode_images([saved(photo, "EPS")])
    with pytest.raises(InvalidItem, match=r"the file is a HEIC image, .*: convert it to JPEG, or send its pixels"):
        client.encode_images([HOSTILE["heic"][0]()])


def test_the_command_uploads_files(server: ServerProcess, tmp_path: Path) -> None:
    (photo := tmp_path / "photo.jpg").write_bytes(saved(photograph(), quality=80))
    (film := tmp_path / "clip.mp4").write_bytes(clip(moving(12)))
    command = ("-c", "import vitwire_cli; vitwire_cli.main()")
    done = finished("encode", photo, film, "--json", "--target", server.target, program=command)
    assert done.returncode == 0, done.stderr
    items = json.loads(done.stdout.splitlines()[-1])["items"]
    assert [item["grid"] for item in items] == [[1, 18, 24], [2, 10, 14]]


OPTIONS: list[dict[str, Any]] = [
    {"max_pixels": 128 * 128},
    {"min_pixels": 400 * 400},
    {"size": {"shortest_edge": 64 * 64, "longest_edge": 200 * 200}, "max_pixels": 150 * 150},
]
"""Options of a processor; the checkpoints' smallest area is above the first one's largest."""


@pytest.mark.parametrize(
    "model_type",
    ["qwen3_vl", *(pytest.param(each, marks=pytest.mark.matrix) for each in ("qwen2_vl", "qwen2_5_vl", "qwen3_5"))],
)
def test_options_are_those_of_plain_transformers(checkpoints: Checkpoints, model_type: str) -> None:
    folder, photo = checkpoints(model_type), photograph(230, 310)
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    reference, grids = reference_of(model_type, folder), set[tuple[int, int, int]]()
    for prepare in ("cpu", "device"):
        flags = (*FLAGS, *SHAPES["edges"], "--prepare", prepare)
        with serving(folder, *flags) as server, Client(server.target) as client:
            assert client.model().options == ("min_pixels", "max_pixels", "frames")
            for options in OPTIONS:
                made = processor(images=[photo], return_tensors="np", **options)
                grid = tuple(made["image_grid_thw"][0].tolist())
                expected = reference.item(grid, made["pixel_values"], None)
                png = saved(photo, "PNG")
                items = [Item.from_file(png, options=options), Item.from_image(photo, options=options)]
                results = dict(client.iter_encode(items, return_exceptions=True))
                for each in (*client.encode(items), results[0], results[1]):
                    assert isinstance(each, Embedding)
                    assert each.grid == grid
                    np.testing.assert_allclose(each.numpy(), expected, rtol=0, atol=1e-4)
                grids.add(grid)
    assert len(grids) == len(OPTIONS)


def test_rows_of_other_options_are_not_those_in_the_cache(client: Client) -> None:
    file, photo = saved(photograph(300, 200), quality=83), np.asarray(photograph(300, 200))
    for make in (lambda options: Item(encoded=file, options=options), lambda options: Item(photo, options=options)):
        plain, small, again, alike, once_more = (
            client.encode([make(each)])[0] for each in ({}, {"max_pixels": 90_000 // 9}, {}, {"max_pixels": 90_001}, {})
        )
        assert (plain.grid, small.grid) != (small.grid, plain.grid)
        assert small.report.path == "eager"
        for each in (again, once_more):
            assert each.report.path == "cache"
            assert_same(each, plain)
        assert_same(alike, plain)


def test_a_name_is_of_the_content_that_was_last_sent_with_it(client: Client) -> None:
    file = saved(photograph(300, 200), quality=82)
    for options in ({}, {"max_pixels": 10_000}):
        (sent,) = client.encode([Item(encoded=file, content_id="by name", options=options)])
        (named,) = client.encode([Item(content_id="by name")])
        assert_same(named, sent)


@pytest.mark.parametrize("stream", [True, False])
def test_invalid_options_fail_alone(client: Client, stream: bool) -> None:
    file, most = saved(photograph(96, 64), quality=81), client.model().limits.patches_per_item
    wide = Item(encoded=saved(photograph(20, 3000)), options={"min_pixels": most * 16 * 16})
    items = [Item(encoded=file), wide, Item(encoded=file, options={"max_pixels": (1 << 63) - 1})]
    results = results_of(client, items, stream=stream)
    assert isinstance(error := results[1], InvalidItem)
    assert (error.item, error.violations[0].field) == (1, "items[1].grid")
    assert isinstance(results[0], Embedding)
    assert isinstance(results[2], Embedding)
    assert_same(results[0], results[2])
    huge = Item(encoded=file, options={"min_pixels": (1 << 63) - 1})
    with pytest.raises(InvalidItem, match=r"items\[0\].options.min_pixels: 9223372036854775807 exceeds"):
        client.encode([huge])
    assert isinstance(results_of(client, [huge, items[0]], stream=True)[1], Embedding)
