"""A server that compiles frequent shapes in a separate process, and how that process ends."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from checkpoints import Checkpoints
from compilers import usual_priority, wait_for, wait_until_gone
from servers import ServerProcess, serving
from vitwire import Client, Item

HITS = 32
_COLUMNS = 3 * 2 * 14**2
pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]


@contextmanager
def compiling(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    """A server whose temporary files are in the folder."""
    usual_priority(folder.parent, monkeypatch)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    with serving(
        model, "--compile", "on", "--dtype", "float32", "--canary-seconds", "0", "--cache-bytes", "0"
    ) as server:
        yield server


def image(side: int) -> Item:
    pixels = np.random.default_rng(side).standard_normal((side**2, _COLUMNS), dtype=np.float32)
    return Item(pixels, (1, side, side))


def compilers(server: ServerProcess) -> list[int]:
    """The processes of its compiler, with those of C++."""
    return [
        child.pid
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if any("vitwire_server.runtime.compiler" in word for word in child.cmdline())
    ]


def test_a_shape_is_compiled_while_requests_are_served(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    with compiling(checkpoints("qwen2_vl"), folder, monkeypatch) as server, Client(server.target) as client:
        (expected,) = client.encode([image(8)])

        def compiled() -> bool:
            (rows,) = client.encode([image(8)])
            np.testing.assert_allclose(rows.numpy(), expected.numpy(), rtol=1e-3, atol=1e-4)
            assert "cannot compile" not in server.log()
            return "compiled 64 patches in" in server.log()

        wait_for(compiled, "the shape is compiled", 800)
        assert (tmp_path / "priorities").read_text() == "19 "
        (after,) = client.encode([image(8)])
        np.testing.assert_allclose(after.numpy(), expected.numpy(), rtol=1e-3, atol=1e-4)
        before = set(compilers(server))
        for _ in range(HITS):
            client.encode([image(12)])
        pids = wait_for(lambda: compilers(server), "the compiler waits, or is at work")
        assert before & set(pids), "the same"
        assert server.stop() == 0
        wait_until_gone(pids)
        assert not list(folder.glob("vitwire-compiler-*"))
        assert "cannot compile" not in server.log()


def test_nothing_is_left_of_a_server_that_is_killed(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    with compiling(checkpoints("qwen2_vl"), folder, monkeypatch) as server, Client(server.target) as client:
        for _ in range(HITS):
            client.encode([image(8)])
        pids = wait_for(lambda: len(found := compilers(server)) > 1 and found, "a compiler and its guard")
        assert list(folder.glob("vitwire-compiler-*"))
        os.kill(server.process.pid, signal.SIGKILL)
        wait_until_gone(pids)
        wait_for(lambda: not list(folder.glob("vitwire-compiler-*")), "its files are removed")
