"""A Vitwire server of a tiny Qwen3-VL, and engines of vLLM that fetch from it."""

import logging
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tests.engines.vllm.cpu_platform  # noqa: F401  # before the rest of vLLM
from tests.engines.vllm.checkpoints import write_checkpoints
from tests.engines.vllm.engine import Engine, vllm_config
from transformers import AutoConfig
from vllm.transformers_utils.configs.dotsocr import DotsOCRConfig
from vllm.v1.engine.input_processor import InputProcessor

from entered import entered
from servers import PYTHON, ServerProcess, serving
from vitwire import Client, Embedding, Item, Model

AutoConfig.register("dots_ocr", DotsOCRConfig)  # with the weights on the hub lies a class of this name
SERVER_FLAGS = ("--cache-bytes", str(64 << 20), "--dtype", "bfloat16", "--graphs", "off")
Cached = Callable[..., Embedding]
Engines = Callable[..., Engine]


def item(content_id: str, grid: tuple[int, int, int] = (1, 4, 4), **arguments: Any) -> Item:
    """An image of its own for every id."""
    pixels = np.random.default_rng(list(content_id.encode())).standard_normal((int(np.prod(grid)), 1536))
    return Item(pixels.astype(np.float32), grid, content_id=content_id, **arguments)


_WRITE = """
import sys
from pathlib import Path
from encoded_files import clip, moving, numbered_clips
for name, file in {
    "usual": clip(moving(30), 10.0),
    "turned": clip(moving(12), 8.0, matrix=(0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30)),
    "every frame": clip(moving(5), 2.0),
    "NTSC, VP9": clip(moving(40), 29.97, "webm", "libvpx-vp9"),
    "odd": clip(moving(17, 98, 134), 7.0),
    "mirrored": clip(moving(12), 8.0, matrix=(-65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30)),
    "upside down": clip(moving(12), 8.0, matrix=(-65536, 0, 0, 0, -65536, 0, 0, 0, 1 << 30)),
    **numbered_clips(),
}.items():
    (Path(sys.argv[1]) / name).write_bytes(file)
"""


@pytest.fixture(scope="session")
def clips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Clips of several rates, codecs and lengths; PyAV of the server's environment makes them."""
    folder = tmp_path_factory.mktemp("clips")
    subprocess.run([PYTHON, "-c", _WRITE, str(folder)], check=True)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def checkpoint(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["qwen3_vl"]


server = entered(lambda checkpoint: serving(checkpoint, *SERVER_FLAGS), scope="session")
client = entered(lambda server: Client(server.target), scope="session")


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

    def engine(target: str = "", extra: dict[str, Any] | None = None, blocks: int = 256, **arguments: Any) -> Engine:
        config = vllm_config(checkpoint, target or server.target, extra, **arguments)
        return stack.enter_context(closing(Engine(config, frontend, blocks)))

    with ExitStack() as stack:
        yield engine


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines()


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What our part of vLLM's log has, from INFO on."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level("INFO", "vllm.vitwire")
    return caplog


@pytest.fixture(scope="session")
def dynamo_configs(checkpoints: dict[str, Path]) -> dict[str, tuple[Any, Any]]:
    """Dynamo's and vLLM's configuration for each model."""
    from tests.engines.vllm.dynamo_worker import worker_config  # noqa: PLC0415  # other tests do without Dynamo

    found = {name: worker_config(checkpoints[name]) for name in ("qwen2_vl", "qwen3_vl", "qwen3_5")}
    return {name: (config, config.engine_args.create_engine_config()) for name, config in found.items()}


@pytest.fixture
def dynamo_workers(
    dynamo_configs: dict[str, tuple[Any, Any]], server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Makes workers of Dynamo that have loaded the encoder, with these variables."""
    from tests.engines.vllm.dynamo_worker import loaded_worker  # noqa: PLC0415  # as above

    made: list[Any] = []
    monkeypatch.setenv("VITWIRE_TARGET", server.target)

    def make(model_type: str = "qwen3_vl", **variables: str) -> Any:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        made.append(loaded_worker(*dynamo_configs[model_type]))
        return made[-1]

    yield make
    for each in made:
        each._custom_encoder.shutdown()
