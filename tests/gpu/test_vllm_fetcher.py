"""The worker's side of vLLM's EC connector on a GPU: rows in device memory, without waiting for the device."""

import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from servers import ServerProcess, serving
from vitwire import Client, Item
from vitwire.integrations.vllm.settings import Settings
from vitwire.integrations.vllm.table import Content, Order, Outcome, Step
from vitwire.integrations.vllm.worker import Expected, Fetcher
from vitwire.shared.agents import is_installed
from vitwire_server.demo.checkpoint import write_demo_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = torch.device("cuda", 0)
CONTENT = Content("key", "cat", "image", (1, 32, 32), 256)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("checkpoint") / "qwen3_vl"
    write_demo_checkpoint("qwen3_vl", folder)
    flags = ["--nixl"] if is_installed() else []
    with serving(folder, "--cache-bytes", str(64 << 20), "--dtype", "bfloat16", "--graphs", "off", *flags) as server:
        yield server


def outcome_of(fetcher: Fetcher, number: int) -> Outcome:
    deadline = time.monotonic() + 60
    while not (outcomes := fetcher.take_outcomes()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (outcome,) = outcomes[number]
    return outcome


@pytest.mark.parametrize("delivery", ["stream", "nixl"])
def test_rows_are_loaded_into_device_memory(server: ServerProcess, delivery: str) -> None:
    if delivery == "nixl" and not is_installed():
        pytest.skip("needs NIXL")
    pixels = np.random.default_rng(0).standard_normal((1024, 1536)).astype(np.float32)
    with Client(server.target, delivery="stream") as client:
        (embedding,) = client.encode([Item(pixels, CONTENT.grid, content_id="cat")])
    fetcher = Fetcher(
        Settings.of({"target": server.target, "delivery": delivery}), Expected(192, torch.bfloat16, DEVICE)
    )
    cache: dict[str, torch.Tensor] = {}
    for number in (1, 2, 3):
        order = Order(number, CONTENT)
        fetcher.follow(Step(fetches=[order]), cache)
        outcome = outcome_of(fetcher, number)
        assert not outcome.error
        nbytes = 256 * 192 * 2
        by_nixl = nbytes if delivery == "nixl" else 0
        assert (outcome.streamed_bytes, outcome.nixl_bytes) == (nbytes - by_nixl, by_nixl)
        held = fetcher._held[number].result()
        assert held.is_cuda if by_nixl else held.is_pinned()
        del held
        cache.clear()
        fetcher.follow(Step(loads=[order]), cache)
        assert cache["key"].device == DEVICE
        assert torch.equal(cache["key"].cpu(), embedding.torch())
        assert not fetcher._held
    fetcher.close()
