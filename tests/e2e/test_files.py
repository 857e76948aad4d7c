"""Files that operators name: a pipe or a directory in their place neither blocks a server nor its start."""

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from certificates import Authority
from checkpoints import Checkpoints
from servers import PIXELS_ONLY, finished, serving
from vitwire import Client, Item

ALICE = "alice-0123456789abcdef"
ITEM = Item(np.ones((16, 3 * 2 * 14 * 14), np.float32), (1, 4, 4))
EDGES = pytest.mark.skipif(sys.platform != "linux", reason="edges need Linux")


def refused(model: Path, *flags: object) -> tuple[int, str]:
    """The exit code of a server that does not start, and the last line that it wrote."""
    done = finished("serve", "--model", model, "--port", "0", "--metrics-port", "0", *map(str, flags))
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.splitlines()[-1]


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=EDGES)])
def test_a_pipe_in_place_of_tokens_and_certificates_changes_nothing(
    processes: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    authority, tokens = Authority(tmp_path / "pki").issue(), tmp_path / "tokens"
    tokens.write_text(f"{ALICE} alice\n")
    files = ("--tls-cert", authority.cert, "--tls-key", authority.key, "--auth-tokens-file", tokens)
    with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, "--rpc-processes", processes, *map(str, files)) as server:
        for file in (tokens, authority.cert):
            os.mkfifo(tmp_path / "pipe")
            (tmp_path / "pipe").replace(file)
        server.wait_for("keeping the previous tokens: .*not a regular file")
        server.wait_for("keeping the previous certificate: .*not a regular file")
        with Client(server.target, tls=authority.root, token=ALICE, timeout=60) as client:
            assert len(client.encode([ITEM])) == 1
            assert client.health() == "SERVING"
        assert server.stop() == 0


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=EDGES)])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_server_does_not_start_with_one(
    processes: str, make: Callable[[Path], None], checkpoints: Checkpoints, tmp_path: Path
) -> None:
    make(tmp_path / "pipe")
    model = checkpoints("qwen2_vl")
    for flag in ("--auth-tokens-file", "--record-trace"):
        code, error = refused(model, "--rpc-processes", processes, flag, tmp_path / "pipe")
        assert code != 0
        assert error.startswith(f"vitwire-server: {flag}")
        assert "not a regular file" in error or "directory" in error


def test_a_pipe_in_a_checkpoint_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert refused(tmp_path) == (
        1,
        f"vitwire-server: {tmp_path}/config.json cannot be read as JSON: [Errno 22] not a regular file: "
        f"'{tmp_path}/config.json'",
    )


def test_a_state_that_is_a_pipe_is_replaced(checkpoints: Checkpoints, tmp_path: Path) -> None:
    learning = ("--graphs", "simulated", "--budgets", "learn", "--max-budget-tokens", "64")
    model, flags = checkpoints("qwen2_vl"), (*learning, "--state-dir")
    with serving(model, *flags, str(tmp_path), "--log-level", "debug") as server, Client(server.target) as client:
        fingerprint = client.model().weights_fingerprint
    os.mkfifo(tmp_path / f"vitwire-ladder-{fingerprint[:16]}-cpu-64.json")
    with serving(model, *flags, str(tmp_path)) as server:
        server.wait_for("is ignored, and replaced when a ladder is learned: not a regular file")


def test_a_default_state_directory_that_cannot_be_made_is_a_warning(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    learning = ("--graphs", "simulated", "--budgets", "learn", "--max-budget-tokens", "64", *PIXELS_ONLY)
    with serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, *learning) as server:
        server.wait_for("learned budgets will not be kept over a restart unless --state-dir is set: .*Not a directory")


@pytest.mark.parametrize("name", ["file", "file/state"])
def test_a_state_directory_must_be_one(checkpoints: Checkpoints, name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, error = refused(checkpoints("qwen2_vl"), "--budgets", "learn", "--state-dir", tmp_path / name)
    assert (code, error.lower()) == (2, f"vitwire-server: --state-dir: [errno 20] not a directory: '{tmp_path}/{name}'")


def test_a_unix_socket_needs_a_short_free_path(checkpoints: Checkpoints, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    long = tmp_path / ("s" * 120)
    for path, reason in {
        tmp_path / "file": "a file that is not a socket is there",
        long: "the path has more than 107 bytes",
        tmp_path / "nowhere" / "s": "there is no such directory",
    }.items():
        for processes in ("1", "2") if sys.platform == "linux" else ("1",):
            flags = ("--unix-socket", path, "--rpc-processes", processes)
            code, error = refused(checkpoints("qwen2_vl"), *flags)
            assert (code, error.partition("cannot listen on ")[2].split("] ")[-1]) == (1, reason)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=EDGES)])
def test_a_server_that_hangs_at_a_socket_still_has_it(processes: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Its queue of connections is full, so a connection attempt would wait."""
    with socket.socket(socket.AF_UNIX) as hanging:
        hanging.bind(str(tmp_path / "s"))
        hanging.listen(0)
        waiting = [socket.socket(socket.AF_UNIX) for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(str(tmp_path / "s"))
        flags = ("--unix-socket", tmp_path / "s", "--rpc-processes", processes)
        code, error = refused(checkpoints("qwen2_vl"), *flags)
        assert (code, "another server listens there" in error) == (1, True)
        for each in waiting:
            each.close()
