"""Compiled forwards give what eager ones give, come only after enough hits, and never block."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Timer

import pytest
import torch

from vitwire_server.core.grids import Grid
from vitwire_server.runtime.attention.selection import select
from vitwire_server.runtime.compiling import Forward, HotShapes, compiled_blocks
from vitwire_server.towers.checkpoints.checkpoint import load_tower, open_checkpoint
from vitwire_server.towers.tower import Metadata, Tower

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tower(checkpoints: Callable[[str], Path]) -> Tower:
    checkpoint = open_checkpoint(str(checkpoints("qwen3_vl")))
    tower = load_tower(checkpoint, dtype=torch.float32, device=CPU, track=lambda shards, *_: shards).tower
    choice = select("auto", CPU, tower.dtype, *tower.attention_heads, captured=False)
    tower.use_attention(choice.implementation)
    return tower


@torch.inference_mode()  # as the engine makes them: torch guards on it
def batch(tower: Tower, *grids: Grid) -> tuple[torch.Tensor, Metadata]:
    metadata = tower.reserve(tower.exact(grids))
    tower.prepare(grids, metadata)
    generator = torch.Generator().manual_seed(0)
    columns = tower.geometry.columns(frames=tower.geometry.temporal)
    return torch.randn(metadata.capacity.patches, columns, generator=generator), metadata


@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_a_hot_shape_is_compiled_beside_the_batches_and_gives_the_same_rows(
    tower: Tower, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("vitwire_server.runtime.compiling._GAIN", 0.0)  # whatever it gains here
    nice = tmp_path / "nice"  # without its effect, or a busy machine would never compile
    nice.write_text(f'#!/bin/sh\necho "$1 $2" >> {tmp_path}/priorities; shift 2; exec "$@"\n')
    nice.chmod(0o755)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hot = HotShapes(tower, hits=3, most=1)
    pixels, metadata = batch(tower, Grid(1, 8, 6), Grid(1, 4, 4))
    other, unlike = batch(tower, Grid(1, 4, 4))
    with torch.inference_mode():
        expected, alone = tower.forward(pixels, metadata), tower.forward(other, unlike)
        for _ in range(2):
            torch.testing.assert_close(hot.forward(pixels, metadata), expected)
        assert not hot._requested, "two hits are too few"
        start = time.perf_counter()
        hot.forward(pixels, metadata)
        asked = time.perf_counter() - start
        for _ in range(5):
            hot.forward(other, unlike)
        assert hot._requested == {metadata.capacity}, "one shape at most"
        deadline = time.monotonic() + 800
        while not hot.ready and time.monotonic() < deadline:
            torch.testing.assert_close(hot.forward(pixels, metadata), expected)
            time.sleep(0.05)
        assert hot.ready == {metadata.capacity}
        assert set((tmp_path / "priorities").read_text().splitlines()) == {"-n 19"}, "the lowest"
        assert asked < 800 - (deadline - time.monotonic()), "the batch that asked did not wait for the compiler"
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        fresh, same = batch(tower, Grid(1, 8, 6), Grid(1, 4, 4))
        torch.testing.assert_close(hot.forward(fresh, same), expected)
        torch.testing.assert_close(hot.forward(other, unlike), alone)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs, "nothing compiles on the way"


def test_a_trace_in_another_thread_does_not_disturb(tower: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.fx redirects the calls of every module for as long as it traces, whichever thread they come from."""
    began, end = Event(), Event()

    def traced(value: object) -> object:
        began.set()
        assert end.wait(60)
        return value

    def compile_slowly(forward: Forward, **_: object) -> Forward:
        def compiled(pixels: torch.Tensor, metadata: Metadata) -> torch.Tensor:
            torch.fx.symbolic_trace(traced)
            return forward(pixels, metadata)

        return compiled

    monkeypatch.setattr(torch, "compile", compile_slowly)
    hot = HotShapes(tower, most=0)
    with torch.inference_mode():
        pixels, metadata = batch(tower, Grid(1, 8, 6))
        expected = tower.forward(pixels, metadata)
        hot._work.put((pixels, metadata))
        assert began.wait(60)
        with pytest.raises(NameError):
            tower.forward(pixels, metadata)
        Timer(0.2, end.set).start()
        torch.testing.assert_close(hot.forward(pixels, metadata), expected)
        assert end.is_set(), "it waited for the trace to end"
    while hot._ended < 1:  # or it measures while the next test compiles
        time.sleep(0.01)


def test_blocks_are_compiled_within_capture_only(tower: Tower) -> None:
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
