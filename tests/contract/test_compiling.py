"""Compiled forwards give what eager ones give, come after enough hits, and never block, whatever the compiler does."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from bench.models import PUBLISHED, build, factory, shrunk

from checkpoints import Checkpoints
from compilers import usual_priority, wait_for, wait_until_gone
from vitwire_server.core.grids import Grid
from vitwire_server.runtime.compiler import child
from vitwire_server.runtime.compiler import hot_shapes as compiling
from vitwire_server.runtime.compiler.child import Compiler, CompilerGone
from vitwire_server.runtime.compiler.hot_shapes import HotShapes, compiled_blocks
from vitwire_server.runtime.compiler.messages import Blueprint, Compile, Factory, Layout, named_tensors
from vitwire_server.runtime.compiler.worker import attend
from vitwire_server.runtime.precision.similarity import least_cosines
from vitwire_server.towers.checkpoints.checkpoint import load_tower, open_checkpoint
from vitwire_server.towers.tower import Metadata, Tower

CPU = torch.device("cpu")
SMALL = shrunk(PUBLISHED["Qwen2-VL-7B"][1], 1, 64)
SERVED = "vitwire_server.runtime.compiler.worker:served"
MADE = factory("qwen2_vl", SMALL, torch.float32, "sdpa")


@pytest.fixture(scope="module")
def tower(checkpoints: Checkpoints) -> Tower:
    checkpoint = open_checkpoint(str(checkpoints("qwen3_vl")))
    tower = load_tower(checkpoint, dtype=torch.float32, device=CPU, track=lambda shards, *_: shards).tower
    attend(tower, "auto")
    return tower


@pytest.fixture(scope="module")
def small() -> Tower:
    """One layer with random weights."""
    tower = build("qwen2_vl", SMALL, torch.float32, CPU)
    tower.rewrite()
    attend(tower, "sdpa")
    return tower


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where compilers make their folders; they run at the usual priority, and whatever they gain is used."""
    usual_priority(tmp_path, monkeypatch)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(compiling, "_GAIN", 0.0)
    return folder


@contextmanager
def hot_shapes(*arguments: Any, **settings: Any) -> Iterator[HotShapes]:
    hot = HotShapes(*arguments, **settings)
    try:
        yield hot
    finally:
        hot.close()


def failing(name: str, marker: Path) -> Factory:
    return Factory(f"compilers:{name}", {"marker": str(marker)})


def started(hot: HotShapes) -> Compiler:
    compiler: Compiler = wait_for(lambda: hot._compiler, "a compiler")
    return compiler


def pids_in(marker: Path) -> list[int]:
    wait_for(marker.exists, "the factory was called")
    return [int(word) for word in marker.read_text().split()]


@torch.inference_mode()  # as the engine makes them
def batch(tower: Tower, *grids: Grid) -> tuple[torch.Tensor, Metadata]:
    metadata = tower.reserve(tower.exact(grids))
    tower.prepare(grids, metadata)
    generator = torch.Generator().manual_seed(0)
    columns = tower.geometry.columns(frames=tower.geometry.temporal)
    return torch.randn(metadata.capacity.patches, columns, generator=generator), metadata


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_a_hot_shape_is_compiled_beside_the_batches_and_gives_the_same_rows(
    tower: Tower, checkpoints: Checkpoints, temporary: Path
) -> None:
    arguments = {"model": str(checkpoints("qwen3_vl")), "pooling": "none", "dtype": "float32", "attention": "sdpa"}
    pixels, metadata = batch(tower, Grid(1, 8, 6), Grid(1, 4, 4))
    other, unlike = batch(tower, Grid(1, 4, 4))
    with torch.inference_mode(), hot_shapes(tower, Factory(SERVED, arguments), hits=3, most=1) as hot:
        expected, alone = tower.forward(pixels, metadata), tower.forward(other, unlike)
        for _ in range(2):
            torch.testing.assert_close(hot.forward(pixels, metadata), expected)
        assert not hot._requested, "two hits are too few"
        hot.forward(pixels, metadata)
        for _ in range(5):
            hot.forward(other, unlike)
        assert hot._requested == {metadata.capacity}, "one shape at most"
        deadline = time.monotonic() + 800
        while not hot.ready and time.monotonic() < deadline:
            torch.testing.assert_close(hot.forward(pixels, metadata), expected)
            time.sleep(0.05)
        assert hot.ready == {metadata.capacity}
        fresh, same = batch(tower, Grid(1, 4, 4), Grid(1, 8, 6))
        assert same.capacity == metadata.capacity
        assert hot._programs[same.capacity].fits(fresh, same), "other items of the same shape"
        torch.testing.assert_close(hot.forward(fresh, same), tower.forward(fresh, same))
        torch.testing.assert_close(hot.forward(pixels, metadata), expected)
        torch.testing.assert_close(hot.forward(other, unlike), alone)


@pytest.mark.timeout(900)
def test_two_shapes_share_a_compiler_and_the_weights(small: Tower, temporary: Path) -> None:
    first, second = batch(small, Grid(1, 8, 6)), batch(small, Grid(1, 4, 4))
    with torch.inference_mode(), hot_shapes(small, MADE, hits=1) as hot:
        for shape in (first, second):
            hot.forward(*shape)
        process = started(hot).process
        wait_for(lambda: len(hot.ready) == 2, "both shapes are compiled")
        assert started(hot).process is process
        assert (temporary.parent / "priorities").read_text() == "19 ", "the lowest, and once"
        own = {tensor.data_ptr() for tensor in named_tensors(small).values()}
        for shape in (first, second):
            program = hot._programs[shape[1].capacity]
            shared = [each for each in program.arguments if isinstance(each, torch.Tensor)]
            assert {tensor.data_ptr() for tensor in shared} == own, "no copy of a weight, and nothing else"
            torch.testing.assert_close(hot.forward(*shape), small.forward(*shape))
        hot.close()
        assert not list(temporary.iterdir())
        wait_until_gone([process.pid])
        for shape in (first, second):
            torch.testing.assert_close(hot.forward(*shape), small.forward(*shape), msg="files are not needed any more")
        weight = next(small.model.parameters())
        before = hot.forward(*first).clone()
        weight.mul_(2)
        changed = hot.forward(*first)
        torch.testing.assert_close(changed, small.forward(*first))
        weight.div_(2)
        assert not torch.allclose(changed, before), "weights are read where the tower has them"
        fresh, unusual = batch(small, Grid(1, 8, 6))
        unusual.tensors = {name: torch.cat([each, each]) for name, each in unusual.tensors.items()}
        assert not hot._programs[unusual.capacity].fits(fresh, unusual), "nothing else checks what compiled code reads"


@pytest.mark.matrix
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "model_type", ["gemma4", "idefics2", "internvl_chat", "mllama", "deepseek_ocr2", "mistral3", "siglip2", "clip"]
)
def test_towers_of_other_layouts_are_compiled(
    model_type: str, checkpoints: Checkpoints, temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With constants, resamplers, tiles, crops, and rows that are pooled."""
    checkpoint = open_checkpoint(str(checkpoints(model_type)))
    pooling = checkpoint.poolings[-1]
    tower = load_tower(checkpoint.pooled(pooling), dtype=torch.bfloat16, device=CPU, track=lambda each, *_: each).tower
    attend(tower, "sdpa")
    arguments = {"model": str(checkpoint.folder), "pooling": pooling.value, "dtype": "bfloat16", "attention": "sdpa"}
    grids = tower.samples(64, 2)
    with torch.inference_mode(), hot_shapes(tower, Factory(SERVED, arguments), hits=1) as hot:
        metadata = tower.reserve(tower.exact(grids))
        tower.prepare(grids, metadata)
        pixels = torch.randn(metadata.capacity.patches, tower.geometry.row).bfloat16()
        if tower.geometry.crop_row:
            metadata.crops = torch.randn(metadata.capacity.crops, tower.geometry.crop_row).bfloat16()
        expected, crops = tower.forward(pixels, metadata), metadata.crops
        hot.forward(pixels, metadata)
        wait_for(lambda: hot.ready or "cannot compile" in caplog.text, "the shape is compiled")
        assert hot.ready, caplog.text
        assert metadata.crops is crops, "it may still be read"
        assert least_cosines(expected, hot.forward(pixels, metadata), 1 + tower.geometry.levels).min() > 0.99


@pytest.mark.matrix
def test_rows_that_differ_are_not_used(small: Tower, temporary: Path, caplog: pytest.LogCaptureFixture) -> None:
    shape = batch(small, Grid(1, 8, 6))
    with torch.inference_mode(), hot_shapes(small, Factory("compilers:other", MADE.arguments), hits=1) as hot:
        hot.forward(*shape)
        wait_for(lambda: "its rows differ from eager ones" in caplog.text, "the reason")
        assert not hot.ready
        assert any(temporary.iterdir()), "the compiler waits for another shape"


def test_a_compiler_that_dies_costs_its_shape_only(
    small: Tower, temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = (batch(small, Grid(1, 2 * side, 4)) for side in (2, 3, 4))
    with torch.inference_mode(), hot_shapes(small, failing("dying", temporary.parent / "marker"), hits=1) as hot:
        hot.forward(*first)
        wait_for(lambda: caplog.messages, "a reason")
        (reason,) = caplog.messages
        assert reason.startswith(f"cannot compile the forward for {first[1].capacity}: ")
        assert reason.endswith("the compiler ended unexpectedly (SIGKILL): the last words")
        assert not list(temporary.iterdir())
        torch.testing.assert_close(hot.forward(*first), small.forward(*first))
        for shape in (second, third):
            hot.forward(*shape)
        wait_for(lambda: len(caplog.messages) == 3, "two more reasons")
        refused = [message.partition("ValueError: ")[2] for message in caplog.messages[1:]]
        assert refused[0].endswith(" has"), "the first line"
        assert refused[0] == refused[1], "one that refuses lives on"
        for shape in (first, second, third):
            hot.forward(*shape)
        assert hot._work.empty(), "none of them is tried again"


@pytest.mark.parametrize("way", ["stop", "slow"])
def test_a_compiler_that_hangs_is_ended_with_its_programs(
    way: str, small: Tower, temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    marker = temporary.parent / "marker"
    monkeypatch.setattr(compiling, "_COMPILE_SECONDS", 3600.0 if way == "stop" else 0.1)
    shape = batch(small, Grid(1, 8, 6))
    with torch.inference_mode(), hot_shapes(small, failing("hanging", marker), hits=1) as hot:
        if way == "slow":
            hot.forward(*shape)
            wait_for(lambda: "it takes more than 0.1 s" in caplog.text, "the reason")
        else:
            hot.forward(*shape)
            pids = pids_in(marker)
            hot.close()
            wait_until_gone(pids)
            hot.forward(*batch(small, Grid(1, 4, 4)))
            assert not caplog.messages, "a server that stops does not complain"
        assert not list(temporary.iterdir())
        assert hot._compiler is None or hot._compiler.process.returncode is not None


def test_a_stop_does_not_wait_for_a_compiler_that_does_not_read(
    small: Tower, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "_STOP_SECONDS", 0.2)
    layout = Layout("float32", (1,), (1,))
    compiler = Compiler(Blueprint(MADE, {f"model.{number}": layout for number in range(100_000)}, 1, sys.path))
    os.kill(compiler.process.pid, signal.SIGSTOP)
    request = Compile(batch(small, Grid(1, 8, 6))[1].capacity, {}, {})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(compiler.compile, request, 3600.0)
        compiler.close()
        with pytest.raises(CompilerGone, match="the server stops"):
            waiting.result(60)
    assert compiler.process.returncode == -signal.SIGKILL
    assert not list(temporary.iterdir())


def test_a_compiler_ends_with_a_server_that_is_killed(temporary: Path) -> None:
    marker = temporary.parent / "marker"
    code = (
        "import sys, tempfile\n"
        f"tempfile.tempdir = {str(temporary)!r}\n"
        "from vitwire_server.runtime.compiler.child import Compiler\n"
        "from vitwire_server.runtime.compiler.messages import Blueprint, Compile, Factory\n"
        "from vitwire_server.towers.metadata import Capacity\n"
        f"factory = Factory('compilers:hanging', {{'marker': {str(marker)!r}}})\n"
        "compiler = Compiler(Blueprint(factory, {}, 1, sys.path))\n"
        "compiler.compile(Compile(Capacity(1, 1, 1, 1), {}, {}), 3600.0)\n"
    )
    path = ":".join(sys.path)
    server = subprocess.Popen([sys.executable, "-c", f"import sys; sys.path[:] = {path!r}.split(':')\n{code}"])
    try:
        pids = pids_in(marker)
        assert all(map(psutil.pid_exists, pids))
    finally:
        server.kill()
        server.wait()
    wait_until_gone(pids)
    wait_for(lambda: not list(temporary.iterdir()), "its files are removed")


def test_an_idle_compiler_ends_and_another_starts(
    small: Tower, temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiling, "_IDLE_SECONDS", 0.1)
    (temporary.parent / "marker").touch()
    with torch.inference_mode(), hot_shapes(small, failing("dying", temporary.parent / "marker"), hits=1) as hot:
        for count in (1, 2):
            hot.forward(*batch(small, Grid(1, 4, 2 * count)))
            wait_for(lambda count=count: len(caplog.messages) == count, "a reason")
            wait_for(lambda: hot._compiler is None, "it has ended")
            assert not list(temporary.iterdir())
    assert caplog.messages[0].partition("process ")[2] != caplog.messages[1].partition("process ")[2]


def test_without_room_for_files_shapes_stay_eager(
    small: Tower, temporary: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(temporary / "missing"))
    shape = batch(small, Grid(1, 8, 6))
    with torch.inference_mode(), hot_shapes(small, MADE, hits=1) as hot:
        hot.forward(*shape)
        wait_for(lambda: "the compiler has no folder to write to: " in caplog.text, "the reason")
        torch.testing.assert_close(hot.forward(*shape), small.forward(*shape))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.matrix)])
def test_blocks_are_compiled_within_capture_only(backend: str, tower: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    pixels, metadata = batch(tower, Grid(1, 8, 6))
    with torch.inference_mode():
        expected = tower.forward(pixels, metadata)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with compiled_blocks(tower):
            torch.testing.assert_close(tower.forward(pixels, metadata), expected)
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert compiled > before
        torch.testing.assert_close(tower.forward(*batch(tower, Grid(1, 6, 6)))[:1].isfinite().all(), torch.tensor(True))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled, "eager stays eager"
