"""The command line, in this process and as a subprocess."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2
from PIL import Image
from safetensors.numpy import load_file
from typer.testing import CliRunner, Result

from fake_service import Fake, Running, abort, serving
from vitwire import Client, Model
from vitwire.model import Limits, TileShapes
from vitwire.v1 import encoder_pb2 as pb
from vitwire_cli.app import app
from vitwire_cli.files import unique_names
from vitwire_cli.info import _lines, _sections

Invoke = Callable[..., Result]


def photo(path: Path, size: tuple[int, int] = (40, 32)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(size[0]).integers(0, 255, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    return [
        photo(tmp_path / "a" / "cat.png"),
        photo(tmp_path / "b" / "cat.png", (24, 16)),
        photo(tmp_path / "dog.png"),
    ]


@pytest.fixture
def vitwire(running: Running) -> Invoke:
    def invoke(*arguments: object) -> Result:
        environment = {"VITWIRE_TARGET": running.target, "COLUMNS": "200"}
        return CliRunner().invoke(app, [str(each) for each in arguments], env=environment)

    return invoke


def test_encode_writes_safetensors(vitwire: Invoke, photos: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "all.safetensors"
    done = vitwire("encode", *photos, "--out", out, "--json")
    assert done.exit_code == 0, done.output
    tensors = load_file(out)
    assert {name: rows.shape for name, rows in tensors.items()} == {
        "a/cat.png": (20, 12),
        "b/cat.png": (6, 12),
        "dog.png": (20, 12),
    }
    assert all(rows.dtype == np.float32 for rows in tensors.values())
    document = json.loads(done.stdout.splitlines()[-1])
    assert [each["file"] for each in document["items"]] == [str(file) for file in photos]
    assert document["items"][1] == {
        "file": str(photos[1]),
        "name": "b/cat.png",
        "grid": [1, 4, 6],
        "tokens": 6,
        "shape": [6, 12],
        "path": "graph",
        "fallback_reason": "",
        "budget_tokens": 64,
        "ms": 1000.001,
    }
    assert "1x4x6" in done.stdout
    assert done.stderr == ""


def written(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_encode_takes_folders(
    vitwire: Invoke, photos: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for other in ("README.txt", ".hidden.png", "a/.git/x.png"):
        photo(tmp_path / "x.png").rename(tmp_path / "made.png")
        (tmp_path / other).parent.mkdir(exist_ok=True)
        (tmp_path / "made.png").rename(tmp_path / other)
    out = tmp_path.parent / f"{tmp_path.name}-rows"
    cases = {
        (tmp_path,): ["a/cat.png.npy", "b/cat.png.npy", "dog.png.npy"],
        ("a",): ["cat.png.npy"],
        ("a/../b", "dog.png"): ["b/cat.png.npy", "dog.png.npy"],
        ("a", "b/cat.png"): ["a/cat.png.npy", "b/cat.png.npy"],
        ("b/cat.png",): ["cat.png.npy"],
        ("dog.png", "dog.png"): ["dog-2.png.npy", "dog.png.npy"],
    }
    for number, (words, names) in enumerate(cases.items()):
        done = vitwire("encode", *words, "--out", out / str(number))
        assert done.exit_code == 0, done.output
        assert written(out / str(number)) == names
    empty = tmp_path / "empty"
    empty.mkdir()
    done = vitwire("encode", "dog.png", "empty", "--out", "x")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("vitwire: empty has no files with the suffixes .avi, .avif, .bmp, .gif, .ico, ")
    done = vitwire("encode", "dog.png", "https://example.com/cat.jpg")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith("vitwire: https:/example.com/cat.jpg is a URL, and the client fetches none")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_files_are_sent_as_they_are(kind: str, tmp_path: Path) -> None:
    file, fake, sent = tmp_path / "picture", Fake(), []
    Image.new("RGB", (40, 32), "red").save(file, kind)
    encode = fake.EncodeStream

    def remembering(requests, context):  # noqa: ANN001, ANN202
        yield from encode((sent.append(each) or each for each in requests), context)

    fake.EncodeStream = remembering  # type: ignore[method-assign]
    with serving(fake) as service:
        done = CliRunner().invoke(app, ["encode", str(file), "--target", service.target])
    assert done.exit_code == 0, done.output
    (header,) = (each.header.header for each in sent if each.HasField("header"))
    assert (header.HasField("pixels"), header.modality) == (False, pb.MODALITY_IMAGE)
    assert b"".join(each.chunk.data for each in sent if each.HasField("chunk")) == file.read_bytes()


def test_files_that_the_server_does_not_decode_are_named(vitwire: Invoke, tmp_path: Path) -> None:
    """Before they are read as a whole; a clip is named too, as this server decodes none."""
    names = ("a.tiff", "b.mp4", "c.png", "empty.jpg", "rows.safetensors")
    tiff, clip, large, empty, out = (tmp_path / name for name in names)
    empty.touch()
    Image.new("RGB", (40, 32)).save(tiff)
    clip.write_bytes(b"\0\0\0\x20ftypisom" + bytes(64))
    large.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(1 << 20))
    done = vitwire("encode", tiff, clip, large, empty, photo(tmp_path / "d.png"), "--out", out)
    assert done.exit_code == 1
    formats = "not of a format that this server decodes: JPEG, PNG, WebP, GIF, BMP"
    assert done.stderr.splitlines() == [
        f"vitwire: {tiff}: {formats}",
        f"vitwire: {clip}: {formats}",
        f"vitwire: {large}: 1048584 bytes exceed the server's limit of 1048576",
        f"vitwire: {empty}: is empty",
    ]
    assert list(load_file(out)) == ["d.png"]


def test_a_server_that_decodes_nothing_is_named(photos: list[Path]) -> None:
    with serving(Fake(change=lambda message: message.ClearField("encodings"))) as service:
        done = CliRunner().invoke(app, ["encode", str(photos[0]), "--target", service.target])
    assert (done.exit_code, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "this server decodes no files" in line
    assert "--decode-processes" in line


def test_type_and_priority_are_those_of_the_options(running: Running, vitwire: Invoke, photos: list[Path]) -> None:
    assert vitwire("encode", photos[0], "--output-type", "float16", "--priority", "batch").exit_code == 0
    assert running.fake.options == [(pb.DATA_TYPE_FLOAT16, pb.PRIORITY_BATCH)]
    assert vitwire("encode", photos[0], "--priority", "urgent").exit_code == 2


def test_many_files_go_in_windows(running: Running, vitwire: Invoke, tmp_path: Path) -> None:
    files = [photo(tmp_path / f"{index}.png", (16, 16)) for index in range(20)]
    done = vitwire("encode", *files, "--json")
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout.splitlines()[-1])["items"]) == 20
    assert running.fake.methods.count("EncodeStream") == 2


@pytest.mark.parametrize(
    ("files", "out", "message"),
    [
        (["a/cat.png", "dog.png"], "x.npy", "one embedding"),
        (["dog.png"], "nowhere/x.npy", "not a directory"),
        (["dog.png"], "x.safetensor", "neither"),
        (["dog.png"], "text.png", "neither"),
        (["dog.png"], "text", "not a directory"),
        (["missing.png"], "x", "missing.png"),
        (["text.png"], "x", "text.png"),
    ],
)
def test_mistakes_are_one_line(
    vitwire: Invoke, photos: list[Path], tmp_path: Path, *, files: list[str], out: str, message: str
) -> None:
    for name in ("text.png", "text"):
        (tmp_path / name).write_text("not an image")
    done = vitwire("encode", *(tmp_path / file for file in files), "--out", tmp_path / out)
    assert done.exit_code == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("vitwire: ")
    assert message in line


def test_a_broken_file_does_not_lose_the_others(vitwire: Invoke, photos: list[Path], tmp_path: Path) -> None:
    text, missing, out = tmp_path / "text.png", tmp_path / "missing.png", tmp_path / "all.safetensors"
    text.write_text("not an image")
    done = vitwire("encode", photos[0], text, photos[1], missing, "--out", out, "--json")
    assert done.exit_code == 1
    shapes = {name: rows.shape for name, rows in load_file(out).items()}
    assert shapes == {"a/cat.png": (20, 12), "b/cat.png": (6, 12)}
    first, second = done.stderr.splitlines()
    assert str(text) in first
    assert str(missing) in second
    document = json.loads(done.stdout.splitlines()[-1])
    assert [each["file"] for each in document["items"]] == [str(photos[0]), str(photos[1])]
    assert [each["file"] for each in document["failed"]] == [str(text), str(missing)]


def test_an_item_that_the_service_fails_does_not_lose_the_others(photos: list[Path], tmp_path: Path) -> None:
    def bend(responses: Iterator[Any]) -> Iterator[Any]:
        for response in responses:
            if response.item != 1:
                yield response
            elif response.chunk.last:
                yield pb.EncodeStreamResponse(item=1, error=Status(code=3, message="too large"))

    with serving(Fake(bend=bend)) as service:
        words = ["encode", *map(str, photos), "--out", str(tmp_path / "out"), "--target", service.target]
        done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert done.stderr == f"vitwire: {photos[1]}: too large\n"
    assert written(tmp_path / "out") == ["a/cat.png.npy", "dog.png.npy"]


def test_encode_writes_by_suffix(vitwire: Invoke, photos: list[Path], tmp_path: Path) -> None:
    """A suffix in upper or lower case decides; a folder may have one too."""
    for name in ("all.SafeTensors", "one.NPY", "two.npy"):
        assert vitwire("encode", photos[0], "--out", tmp_path / name).exit_code == 0
    assert load_file(tmp_path / "all.SafeTensors")["cat.png"].shape == (20, 12)
    assert np.load(tmp_path / "one.NPY").shape == np.load(tmp_path / "two.npy").shape == (20, 12)
    assert vitwire("encode", *photos, "--out", tmp_path / "new" / "folder").exit_code == 0
    assert written(tmp_path / "new" / "folder") == ["a/cat.png.npy", "b/cat.png.npy", "dog.png.npy"]
    (tmp_path / "rows.v2").mkdir()
    assert vitwire("encode", photos[0], "--out", tmp_path / "rows.v2").exit_code == 0
    assert written(tmp_path / "rows.v2") == ["cat.png.npy"]


def test_failures_of_the_service_are_one_line(photos: list[Path]) -> None:
    fake = Fake(before=lambda context: abort(context, grpc.StatusCode.UNAUTHENTICATED))
    with serving(fake) as running:
        done = CliRunner().invoke(app, ["info", "--target", running.target, "--token", "wrong"])
    assert done.exit_code == 1
    assert done.stderr == "vitwire: as asked: set --token or VITWIRE_TOKEN\n"
    assert fake.metadata["authorization"] == "Bearer wrong"


def test_info_shows_the_model(running: Running, vitwire: Invoke) -> None:
    running.fake.fingerprint = "0123456789abcdef" * 4
    done = vitwire("info", "--json")
    assert done.exit_code == 0, done.output
    assert "sdpa" in done.stdout
    lines = done.stdout.splitlines()[:-1]
    assert [line for line in lines if line[0] != " "] == [
        "model", "embeddings", "pixels", "preparation", "places", "server", "graphs", "limits",
    ]  # fmt: skip
    assert "  prepared                 image, video" in lines
    assert "  preparation fingerprint  cd" in lines
    assert f"  weights fingerprint  {running.fake.fingerprint}" in lines, "in one piece, for copying"
    assert {"  budgets          64", "  dropped budgets  128 (no memory)"} <= {*lines}
    assert {"  preparation    device", "  clip decoding  cpu (asked)", "  unavailable        fa4 (not installed)"} <= {
        *lines
    }
    assert not [line for line in lines if line.endswith(("None", "-", "{}", "()"))]
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["model_type"] == "qwen3_vl"
    assert document["preparation_fingerprint"] == "cd"
    (budget,) = document["budgets"]
    assert budget == {"tokens": 64, "items": 4, "segments": 4, "segment_patches": 256, "crops": 0}


def test_info_shows_every_field_of_the_model(running: Running) -> None:
    with Client(running.target, timeout=20) as client:
        tiles = TileShapes((28, 14), (56, 56), 0, False, ((1, 2), (2, 1)))
        model = replace(client.model(), tiles=tiles)
    sections = _sections(model)
    shown = {name for entries in sections.values() for name in entries}
    inner = {"limits": Limits, "tiles": TileShapes}
    assert sections.keys() > inner.keys()
    for kind in inner.values():
        assert {each.name for each in fields(kind)} <= shown
    assert {each.name for each in fields(Model)} - inner.keys() <= shown
    assert {"  tile     28x14", "  crop     56x56", "  layouts  1x2, 2x1"} <= set(_lines(model))


def test_health_is_the_exit_code(running: Running, vitwire: Invoke) -> None:
    done = vitwire("health")
    assert (done.exit_code, done.stdout) == (0, "SERVING\n")
    running.health.set("liveness", health_pb2.HealthCheckResponse.NOT_SERVING)
    done = vitwire("health", "liveness")
    assert (done.exit_code, done.stdout) == (1, "NOT_SERVING\n")


def test_tls_needs_its_files_to_go_together(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["health", "--cert", str(tmp_path / "x")])
    assert done.exit_code == 1
    assert "must be set together" in done.stderr


def test_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("vitwire ")


def test_names_are_made_unique() -> None:
    assert unique_names(["a.b", "a.b", "a-2.b", "a.b"]) == ["a.b", "a-3.b", "a-2.b", "a-4.b"]
    assert unique_names(["x/a.b", "a.b", "x/a.b"]) == ["x/a.b", "a.b", "x/a-2.b"]


def process(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    environment = os.environ | environment
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=60)


MAIN = "from vitwire_cli import main; main()"
NO_MEMORY = """
import numpy as np
from vitwire_cli.bench import workload
workload._random = lambda *_: np.empty(1 << 62, "u1")
"""


def test_a_lack_of_memory_is_one_line(running: Running) -> None:
    done = process(NO_MEMORY + MAIN, "bench", "--target", running.target)
    assert done.returncode == 1
    assert done.stderr.startswith("vitwire: out of memory: Unable to allocate")
    assert len(done.stderr.splitlines()) == 1


def test_as_a_process(running: Running) -> None:
    done = process(MAIN, "info", "--json", VITWIRE_TARGET=running.target)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["model_id"] == "tiny"
    for target in (["127.0.0.1:1"], [running.target, "--tls"]):
        done = process(MAIN, "info", "--timeout", "1", "--target", *target)
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("words", "completed"), [("vitwire enc", ["encode"]), ("vitwire info --tar", ["--target"])])
def test_shells_complete_commands_and_flags(words: str, completed: list[str]) -> None:
    place = str(len(words.split()) - 1)
    done = process(MAIN, _VITWIRE_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=place)
    assert (done.returncode, done.stdout.split()) == (0, completed)


@pytest.mark.parametrize("missing", ["typer", "rich"])
@pytest.mark.parametrize(
    ("words", "extra"),
    [(["info"], "cli"), ([], "cli"), (["router", "--port", "0"], "router"), (["sglang-encoder"], "sglang")],
)
def test_missing_extras_are_named(missing: str, words: list[str], extra: str) -> None:
    done = process(f"import sys; sys.modules['{missing}'] = None\n" + MAIN, *words)
    assert done.returncode == 1
    assert done.stderr == f"vitwire: {missing} is not installed; in a checkout of Vitwire: pip install '.[{extra}]'\n"
