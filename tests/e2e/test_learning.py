"""`--budgets learn` on real servers: padding falls, answers stay right, and a restart begins with what was learned."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from bench import noop_server
from bench.sizes import trace

from checkpoints import Checkpoints
from reference import TOLERANCE, Array, Reference, error
from servers import PIXELS_ONLY, SERVER, ServerProcess, serving, supervising
from vitwire import Client, Item
from waiting import until

FLAGS = ("--graphs", "simulated", "--budgets", "learn", "--dtype", "float32", "--max-budget-tokens", "256")
COLUMNS = 3 * 2 * 14 * 14
PADDED = (1, 14, 28)
"""98 tokens, which take a budget of 120 in the default ladder."""
DEADLINE = 60.0
SOON = "from vitwire_server.runtime.ladders import learning; learning._FIT_SECONDS = 0; "
"""Code of a server that fits as soon as there are loads, not once a minute."""
EAGER = ("-c", f"{SOON}from vitwire_server.__main__ import main; main()")


@dataclass(frozen=True)
class Image:
    """An image and its rows by plain transformers."""

    item: Item
    expected: Array

    @classmethod
    def drawn(cls, reference: Reference, grid: tuple[int, int, int], seed: int = 0) -> "Image":
        pixels = np.random.default_rng(seed).standard_normal((grid[1] * grid[2], COLUMNS), dtype=np.float32)
        return cls(Item(pixels, grid), reference.encode(pixels, [grid])[0])

    def send(self, client: Client) -> None:
        (embedding,) = client.encode([self.item], timeout=DEADLINE)
        assert error(embedding.numpy(), self.expected) <= TOLERANCE


@pytest.fixture(scope="module")
def reference(references: Callable[..., Reference]) -> Reference:
    return references("qwen2_vl", torch.float32)


@contextmanager
def learning(folder: Path, state: Path, *flags: str, program: tuple[str, ...] = SERVER) -> Iterator[ServerProcess]:
    with serving(folder, *FLAGS, "--state-dir", str(state), *flags, program=program) as server:
        yield server


def budgets(server: ServerProcess) -> list[int]:
    with Client(server.target) as client:
        return [budget.tokens for budget in client.model().budgets]


def swaps(server: ServerProcess) -> float:
    return server.metric("vitwire_ladder_refits_total", result="swapped")


def padding(server: ServerProcess, send: Callable[[], object]) -> float:
    """Share of padding among the tokens that were computed meanwhile."""
    before = [server.metric("vitwire_tokens_total", kind=kind) for kind in ("real", "padding")]
    send()
    real, padded = (
        server.metric("vitwire_tokens_total", kind=kind) - then
        for kind, then in zip(("real", "padding"), before, strict=True)
    )
    return padded / (real + padded)


def until_swapped(server: ServerProcess, send: Callable[[], object], most: int) -> int:
    """Send until the ladder changes once more; returns how often."""
    before = swaps(server)
    for count in range(1, most + 1):
        send()
        if not count % 16 and swaps(server) > before:
            return count
    raise AssertionError(f"no other ladder after {most} requests: {server.log()[-2000:]}")


def test_a_load_is_learned_and_a_restart_begins_with_it(
    checkpoints: Checkpoints, reference: Reference, tmp_path: Path
) -> None:
    image = Image.drawn(reference, PADDED)
    with learning(checkpoints("qwen2_vl"), tmp_path) as server, Client(server.target) as client:
        default = budgets(server)
        assert 98 not in default
        assert padding(server, lambda: image.send(client)) == pytest.approx(22 / 120)
        until_swapped(server, lambda: image.send(client), 1024)
        assert padding(server, lambda: [image.send(client) for _ in range(8)]) == 0
        assert "learned ladder of" in server.log()
        assert {98, 256} <= set(budgets(server))
        assert len(budgets(server)) <= len(default)
        assert server.metric("vitwire_graphs_captured") == len(budgets(server))
        assert server.metric("vitwire_ladder_gain_ratio") > 0
        learned = budgets(server)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
    with learning(checkpoints("qwen2_vl"), tmp_path) as server, Client(server.target) as client:
        assert f"beginning with the {len(learned)} budgets of {tmp_path}" in server.log()
        assert budgets(server) == learned
        assert padding(server, lambda: image.send(client)) == 0


@pytest.mark.matrix
def test_no_answer_is_wrong_or_late_while_the_load_changes(
    checkpoints: Checkpoints, reference: Reference, tmp_path: Path
) -> None:
    """Four clients at once, through two edges, while the ladder follows two loads and meets a third."""
    loads = [[PADDED], [(1, 22, 22)], [(1, 4, 8), (1, 18, 20), (1, 26, 26), (1, 10, 30)]]
    images = [[Image.drawn(reference, grid, seed) for seed, grid in enumerate(grids)] for grids in loads]
    with learning(checkpoints("qwen2_vl"), tmp_path, "--rpc-processes", "2", program=EAGER) as server:
        with Client(server.target) as client, ThreadPoolExecutor(4) as pool:
            for own in images:
                last = swaps(server)
                for _ in range(24 if own is not images[-1] else 2):
                    list(pool.map(lambda number, own=own: own[number % len(own)].send(client), range(128)))
                    if swaps(server) > last:
                        break
                assert swaps(server) > last or own is images[-1]
        pause = server.metric("vitwire_ladder_pause_seconds")
        assert 0 < pause < 30
        assert server.metric("vitwire_expired_total") == server.metric("vitwire_items_failed_total") == 0
        in_use = {int(size) for size in _in_use(server)}
        until(lambda: set(budgets(server)) == in_use)  # edges hear of it a little later


def _in_use(server: ServerProcess) -> list[str]:
    lines = [line for line in server.page("/metrics")[1].splitlines() if line.startswith("vitwire_ladder_budgets{")]
    return [line.split('"')[1] for line in lines if line.endswith(" 1.0")]


@pytest.mark.matrix
def test_the_shipped_sizes_pad_below_four_per_cent_after_other_loads(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Images of 182 tokens, then of 35, then of the sizes of bench/sizes.py; nothing is computed."""
    program = ("-c", f"{SOON}import runpy; runpy.run_path({noop_server.__file__!r}, run_name='__main__')")
    flags = ("--max-budget-tokens", "4096", "--state-dir", str(tmp_path))
    with (
        serving(checkpoints("qwen2_vl"), *PIXELS_ONLY, *FLAGS[:-2], *flags, program=program) as server,
        Client(server.target) as client,
    ):

        @cache
        def item(grid: tuple[int, int, int]) -> Item:
            return Item(np.ones((grid[1] * grid[2], COLUMNS // 2), np.uint8), grid)

        def send(grid: tuple[int, int, int]) -> None:
            client.encode([item(grid)], timeout=DEADLINE)

        until_swapped(server, lambda: send((1, 26, 28)), 1024)
        assert padding(server, lambda: send((1, 26, 28))) == 0
        for _ in range(600):
            send((1, 10, 14))
        arriving = ((grid.t, grid.h, grid.w) for request in trace(8000, seed=3) for grid in request)
        until_swapped(server, lambda: send(next(arriving)), 6000)
        assert padding(server, lambda: [send(next(arriving)) for _ in range(400)]) < 0.04
        assert swaps(server) <= 4, "it does not flap"


@pytest.mark.matrix
def test_memory_is_flat_over_twenty_changes(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Loads that change again and again, each to a size that pads; earlier ones are soon forgotten."""
    import psutil  # noqa: PLC0415 - this test only

    forgetful = (
        "from vitwire_server.fitting import learned\n"
        f"learned.HALF_LIFE = 128\n{SOON}\n"
        f"import runpy; runpy.run_path({noop_server.__file__!r}, run_name='__main__')"
    )
    program = ("-c", forgetful)
    with learning(checkpoints("qwen2_vl"), tmp_path, program=program) as server, Client(server.target) as client:
        memory = []
        for change in range(20):
            grid = (1, 2, 2 * ((122, 146, 178, 98, 218)[change % 5] + 3 * (change // 5)))
            item = Item(np.ones((grid[1] * grid[2], COLUMNS // 2), np.uint8), grid)
            until_swapped(server, lambda: client.encode([item], timeout=DEADLINE), 6000)  # noqa: B023 - called at once
            memory.append(psutil.Process(server.process.pid).memory_info().rss)
        assert max(memory[10:]) < 1.1 * max(memory[2:6])
        assert server.metric("vitwire_ladder_grown_bytes") == 0


@pytest.mark.matrix
def test_a_failed_capture_keeps_the_ladder(checkpoints: Checkpoints, reference: Reference, tmp_path: Path) -> None:
    broken = (
        "from vitwire_server.runtime.graphs import SimulatedRecorder as R\n"
        "R.record = lambda self, forward: forward\n"
        "def capture(self, forward): raise RuntimeError('injected')\n"
        f"R.capture = capture\n{SOON}\n"
        "from vitwire_server.__main__ import main; main()"
    )
    image = Image.drawn(reference, PADDED)
    with learning(checkpoints("qwen2_vl"), tmp_path, program=("-c", broken)) as server, Client(server.target) as client:
        default = budgets(server)
        while "no other is tried" not in server.log():
            image.send(client)
        assert budgets(server) == default
        assert swaps(server) == 0
        assert server.metric("vitwire_ladder_refits_total", result="failed") == 3
        assert not list(tmp_path.iterdir())


@pytest.mark.matrix
def test_a_file_of_something_else_is_ignored(checkpoints: Checkpoints, reference: Reference, tmp_path: Path) -> None:
    image = Image.drawn(reference, PADDED)
    with learning(checkpoints("qwen2_vl"), tmp_path) as server, Client(server.target) as client:
        until_swapped(server, lambda: image.send(client), 1024)
    (file,) = tmp_path.iterdir()
    document = json.loads(file.read_text())
    for content in ("{", json.dumps(document | {"weights": "0" * 64})):
        file.write_text(content)
        with learning(checkpoints("qwen2_vl"), tmp_path) as server:
            server.wait_for(f"{file} is ignored, and replaced when a ladder is learned: ")
            assert 98 not in budgets(server)


@pytest.mark.matrix
def test_processes_of_several_devices_share_the_directory(
    checkpoints: Checkpoints, reference: Reference, tmp_path: Path
) -> None:
    image = Image.drawn(reference, PADDED)
    flags = (*FLAGS, "--state-dir", str(tmp_path))
    with supervising(checkpoints("qwen2_vl"), "cpu,cpu", *flags) as (_, children):
        for server in children.values():
            with Client(server.target) as client:
                until_swapped(server, lambda: image.send(client), 1024)
    assert len(list(tmp_path.iterdir())) == 1
    with supervising(checkpoints("qwen2_vl"), "cpu,cpu", *flags) as (_, children):
        assert all(98 in budgets(server) for server in children.values())
