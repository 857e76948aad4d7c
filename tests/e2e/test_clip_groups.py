"""Rows of clips that leave while others are computed, through both clients."""

from collections.abc import Iterator

import numpy as np
import pytest
from bench.callers import SyncClient, Work

from both_clients import Call, both
from checkpoints import Checkpoints
from encoded_files import clip, moving
from reference import TOLERANCE, error
from servers import ServerProcess, emptied
from vitwire import Item, RowGroup
from vitwire_cli.bench.load import Pace


@pytest.fixture(scope="module")
def server(checkpoints: Checkpoints) -> Iterator[ServerProcess]:
    flags = ("--graphs", "simulated", "--budgets", "32,64", "--max-budget-tokens", "64", "--rpc-processes", "2")
    with emptied(checkpoints("qwen3_vl"), "--dtype", "float32", "--prepare", "device", *flags) as process:
        yield process


@both
async def test_groups_are_the_rows_of_the_whole_clip_in_order(make: Call, server: ServerProcess) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (41, 160, 192, 3), np.uint8)
    async with make(server.target) as client:
        for item in (Item(frames, modality="video"), Item(encoded=clip(moving(60)), modality="video")):
            (whole,) = await client.encode([item])
            *groups, last = [rows async for _, rows in client.iter_encode(iter([item]), groups=True)]
            assert [each.row for each in groups if isinstance(each, RowGroup)] == [*range(0, last.shape[0] - 12, 12)]
            np.testing.assert_array_equal(np.concatenate([each.numpy() for each in groups]), last.numpy()[:-12])
            apart = error(last.numpy(), whole.numpy())
            assert (apart <= TOLERANCE, whole.report.path, last.report.path) == (True, "eager", "graph")
        async for _ in client.iter_encode([item] * 3, groups=True):
            break  # which leaves nothing on the server


@pytest.mark.parametrize("pixels", ["uint8", "clip"])
def test_the_client_of_benchmarks_calls_it(pixels: str, server: ServerProcess) -> None:
    caller = SyncClient(server.target)
    assert caller.prepare(Work("64", pixels))["tokens"] > 0
    assert {*caller.run(Pace(1, 0.3))["error"]} == {""}
