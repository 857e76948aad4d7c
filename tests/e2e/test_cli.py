"""The `vitwire` command against a real server."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import skimage
from safetensors.numpy import load_file

from checkpoints import Checkpoints
from encoded_files import clip, moving, photograph, saved
from entered import entered
from reference import TOLERANCE, error
from servers import ServerProcess, finished, serving
from vitwire import Client, Item

VITWIRE = Path(sys.executable).with_name("vitwire")
HOPPER = Path(mpl.get_data_path()) / "sample_data" / "grace_hopper.jpg"
COFFEE = Path(skimage.__file__).parent / "data" / "coffee.png"

server = entered(lambda checkpoints: serving(checkpoints("qwen2_5_vl"), "--dtype", "float32"))


def vitwire(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return finished(*words, program=(str(VITWIRE),))


def encode(server: ServerProcess, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return vitwire("encode", *words, "--target", server.target)


@contextmanager
def started(*words: str | Path, flags: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, *flags, VITWIRE, *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_encode_writes_what_the_client_gets(server: ServerProcess, tmp_path: Path) -> None:
    """A file of each format that the server decodes."""
    folder, out, single = tmp_path / "files", tmp_path / "rows.safetensors", tmp_path / "one.npy"
    folder.mkdir()
    for kind in ("jpeg", "png", "webp", "gif", "bmp"):
        (folder / f"photo.{kind}").write_bytes(saved(photograph(), kind))
    (folder / "clip.mp4").write_bytes(clip(moving(10)))
    done = encode(server, folder, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    names = sorted(each.name for each in folder.iterdir())
    assert len(json.loads(done.stdout.splitlines()[-1])["items"]) == len(names)
    with Client(server.target) as client:
        *expected, coffee = client.encode([*(Item.from_file(folder / name) for name in names), Item.from_file(COFFEE)])
    rows = load_file(out)
    assert sorted(rows) == names
    for name, each in zip(names, expected, strict=True):
        assert error(rows[name], each.numpy()) <= TOLERANCE
    assert encode(server, COFFEE, "--out", single).returncode == 0
    assert error(np.load(single), coffee.numpy()) <= TOLERANCE


@pytest.mark.parametrize(("words", "message"), [
    (["router", "--max-images", "x"], "Invalid value for '--max-images' (env var: 'VITWIRE_ROUTER_MAX_IMAGES'): Input "
                                      "should be a valid integer, unable to parse string as an integer"),
    (["router", "--modle=m"], "No such option: --modle (Possible options: --mode)"),
    (["encode"], "Missing argument 'files'."),
    (["nothing"], "No such command 'nothing'."),
])  # fmt: skip
def test_wrong_words_are_one_line(words: list[str], message: str) -> None:
    done = vitwire(*words)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"vitwire: {message}\n")


def test_without_a_command_there_is_help() -> None:
    done = vitwire()
    assert (done.returncode, "Usage: vitwire" in done.stdout, done.stderr) == (2, True, "")


@pytest.fixture
def window(tmp_path: Path) -> list[Path]:
    """As many images as are sent together, then a named pipe and one more image."""
    files = [tmp_path / f"{index}.png" for index in range(16)]
    for file in files:
        shutil.copy(COFFEE, file)
    os.mkfifo(tmp_path / "pipe.png")
    return [*files, tmp_path / "pipe.png", Path(shutil.copy(COFFEE, tmp_path))]


def test_names_that_are_not_utf8(server: ServerProcess, tmp_path: Path) -> None:
    odd = tmp_path / "[" / os.fsdecode(b"b] caf\xe9.png")  # its path looks like Rich's markup, too
    odd.parent.mkdir()
    shutil.copy(COFFEE, odd)
    hopper = shutil.copy(HOPPER, tmp_path)
    out = tmp_path / "rows.safetensors"
    done = encode(server, odd, hopper, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    assert list(load_file(out)) == [r"[/b] caf\xe9.png", "grace_hopper.jpg"]
    assert json.loads(done.stdout.splitlines()[-1])["items"][0]["file"] == rf"{tmp_path}/[/b] caf\xe9.png"
    assert encode(server, odd, hopper, "--out", tmp_path / "rows").returncode == 0
    assert len(list((tmp_path / "rows").rglob("*.npy"))) == 2


def test_a_name_too_long_for_its_rows_does_not_lose_the_others(server: ServerProcess, tmp_path: Path) -> None:
    longest = tmp_path / f"{'n' * 251}.png"
    shutil.copy(COFFEE, longest)
    done = encode(server, longest, shutil.copy(COFFEE, tmp_path), "--out", tmp_path / "rows", "--json")
    assert done.returncode == 1
    assert "File name too long" in done.stderr
    assert [file.name for file in (tmp_path / "rows").iterdir()] == ["coffee.png.npy"]
    document = json.loads(done.stdout.splitlines()[-1])
    assert [len(document[part]) for part in ("items", "failed")] == [1, 1]


def test_a_pipe_that_nobody_writes_to_fails_within_the_timeout(server: ServerProcess, tmp_path: Path) -> None:
    pipe, out = tmp_path / "pipe.png", tmp_path / "rows.safetensors"
    os.mkfifo(pipe)
    done = encode(server, shutil.copy(COFFEE, tmp_path), pipe, "--timeout", "5", "--out", out)
    assert done.returncode == 1
    assert f"{pipe}: the pipe was not closed by its writers within 5 s" in done.stderr
    assert list(load_file(out)) == ["coffee.png"]


def test_a_pipe_is_read_as_a_file_is(server: ServerProcess, tmp_path: Path) -> None:
    pipes = [tmp_path / "good.png", tmp_path / "bad.png"]
    for pipe in pipes:
        os.mkfifo(pipe)
    out = tmp_path / "rows.safetensors"
    with started("encode", shutil.copy(HOPPER, tmp_path), *pipes, "--target", server.target, "--out", out) as process:
        for pipe, content in zip(pipes, (HOPPER.read_bytes(), b"no image"), strict=True):
            pipe.write_bytes(content)
        errors = process.communicate(timeout=120)[1]
    assert process.returncode == 1
    assert f"{pipes[1]}: not of a format that this server decodes: JPEG, PNG" in errors
    rows = load_file(out)
    np.testing.assert_array_equal(rows["good.png"], rows["grace_hopper.jpg"])


def test_a_server_that_dies_does_not_lose_what_is_done(
    checkpoints: Checkpoints, window: list[Path], tmp_path: Path
) -> None:
    out = tmp_path / "rows"
    with serving(checkpoints("qwen2_5_vl")) as server:
        words = ("encode", *window, "--target", server.target, "--out", out, "--timeout", "30", "--json")
        with started(*words) as process, window[16].open("wb") as pipe:  # opened once the first images are done
            server.process.kill()
            server.process.wait()
            pipe.write(COFFEE.read_bytes())
            pipe.close()
            output, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert {file.stem for file in out.iterdir()} == {file.name for file in window[:16]}
    document = json.loads(output.splitlines()[-1])
    assert [each["file"] for each in document["failed"]] == [str(file) for file in window[16:]]
    assert all(f"{file}: not encoded: " in errors for file in window[16:])
    assert "Traceback" not in errors


def test_ctrl_c_does_not_lose_what_is_done(server: ServerProcess, window: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "rows"
    with (
        started("encode", *window, "--target", server.target, "--out", out) as process,
        window[16].open("wb"),
    ):
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert {file.stem for file in out.iterdir()} == {file.name for file in window[:16]}
    assert errors.splitlines() == [f"vitwire: {file}: not encoded: interrupted" for file in window[16:]]


@pytest.mark.parametrize("imported", ["numpy", "grpc", "typer", "vitwire_cli.app"])
def test_ctrl_c_during_imports_leaves_no_traceback(imported: str) -> None:
    with started("info", flags=("-X", "importtime")) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.split("|")[-1].strip() == imported:
                process.send_signal(signal.SIGINT)
                break
        errors = process.communicate(timeout=120)[1]
    assert "Traceback" not in errors
    assert process.returncode in (-signal.SIGINT, 130)


@pytest.mark.parametrize(
    "words", [["info", "--json"], ["health"], ["--help"], ["bench", "--requests", "1"], ["encode"]]
)
def test_a_full_disk_behind_stdout_is_one_line(server: ServerProcess, words: list[str], tmp_path: Path) -> None:
    if words[0] != "--help":
        words = [*words, "--target", server.target]
    if words[0] == "encode":
        words += [str(COFFEE), "--json", "--out", str(tmp_path / "one.npy")]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [VITWIRE, *words], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    assert (done.returncode, done.stderr) == (1, "vitwire: standard output: No space left on device\n")
    assert (tmp_path / "one.npy").exists() is (words[0] == "encode")


@pytest.mark.parametrize("words", [["encode", str(COFFEE)], ["bench", "--requests", "1"]])
def test_wait_is_for_a_server_that_is_still_to_come(words: list[str], checkpoints: Checkpoints, tmp_path: Path) -> None:
    path = tmp_path / "vitwire.sock"
    with started(*words, "--wait", "--timeout", "120", "--target", f"unix:{path}") as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line == f"vitwire: waiting up to 600 s for the server at unix:{path} to be ready\n"
        with serving(checkpoints("qwen2_5_vl"), "--unix-socket", str(path), wait=False):
            errors = process.communicate(timeout=240)[1]
    hint = "vitwire: nothing was written: set --out to keep the embeddings\n" if words[0] == "encode" else ""
    assert (process.returncode, errors) == (0, hint)
