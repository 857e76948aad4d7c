"""A Vitwire server of a tiny Qwen3-VL, and engines of vLLM that fetch from it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tests.engines.vllm.cpu_platform  # noqa: F401  # before the rest of vLLM
from tests.engines.vllm.checkpoints import write_checkpoint
from tests.engines.vllm.engine import Engine, vllm_config
from vllm.v1.engine.input_processor import InputProcessor

from servers import ServerProcess, serving
from vitwire import Client, Embedding, Item, Model

SERVER_FLAGS = ("--cache-bytes", str(64 << 20), "--dtype", "bfloat16", "--graphs", "off")
Cached = Callable[..., Embedding]
Engines = Callable[..., Engine]


def item(content_id: str, grid: tuple[int, int, int] = (1, 4, 4), **arguments: Any) -> Item:
    """An image of its own for every id."""
    pixels = np.random.default_rng(list(content_id.encode())).standard_normal((int(np.prod(grid)), 1536))
    return Item(pixels.astype(np.float32), grid, content_id=content_id, **arguments)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="session")
def server(checkpoint: Path) -> Iterator[ServerProcess]:
    with serving(checkpoint, *SERVER_FLAGS) as server:
        yield server


@pytest.fixture(scope="session")
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.target) as client:
        yield client


@pytest.fixture(scope="session")
def model(client: Client) -> Model:
    return client.model()


@pytest.fixture
def cached(client: Client) -> Cached:
    """Has the server cache the embedding of an image, as a router does."""

    def encode(content_id: str, grid: tuple[int, int, int] = (1, 4, 4)) -> Embedding:
        return client.encode([item(content_id, grid)])[0]

    return encode


@pytest.fixture(scope="session")
def frontend(checkpoint: Path) -> InputProcessor:
    return InputProcessor(vllm_config(checkpoint, "localhost:1"))


@pytest.fixture
def engines(checkpoint: Path, server: ServerProcess, frontend: InputProcessor) -> Iterator[Engines]:
    """Makes engines, one at a time: vLLM has one worker-side connector per process."""
    made: list[Engine] = []

    def engine(target: str = "", extra: dict[str, Any] | None = None, blocks: int = 256, **arguments: Any) -> Engine:
        config = vllm_config(checkpoint, target or server.target, extra, **arguments)
        made.append(Engine(config, frontend, blocks))
        return made[-1]

    yield engine
    for each in made:
        each.close()


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines()
