"""SGLang's own code on a machine without a GPU, and real processes of Vitwire and its adapter.

SGLang is imported as it is. Two packages that it imports at the top of modules have no build that works on this CPU,
and stand-ins take their place: sgl_kernel (CUDA kernels) and torchvision. Nothing that these tests run calls them.
"""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image

_STAND_INS = frozenset({"sgl_kernel", "torchvision"})
os.environ["SGLANG_HOST_IP"] = "127.0.0.1"


class _AnyType(type):
    """A class that has every attribute, so that decorators, annotations and base classes at import time work."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyType(name, (), {})

    def __call__(cls, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else _AnyType("result", (), {})


class _StandIn(ModuleType):
    __path__: ClassVar[list[str]] = []
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyType(name, (), {})


class _StandIns:
    """Finds stand-ins for packages that have no CPU build."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in _STAND_INS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, _: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _StandIns())

from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor  # noqa: E402
from sglang.srt.multimodal.transport import determine_tensor_transport_mode  # noqa: E402
from sglang.srt.runtime_context import publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import AutoConfig, PreTrainedTokenizerFast  # noqa: E402

from adapters import adapting  # noqa: E402
from entered import entered  # noqa: E402
from servers import PYTHON, ServerProcess, serving  # noqa: E402
from vitwire import Client, Embedding  # noqa: E402


@dataclass
class SGLang:
    """SGLang's tokenizer side for a checkpoint: its arguments, configuration and processor."""

    server_args: Any
    config: Any
    processor: Any
    tokenizer: Any = field(repr=False)

    def prompt(self, images: int) -> str:
        """A text with images between words."""
        image = " <|vision_start|><|image_pad|><|vision_end|> "
        return "w5 " + "w6 w7".join([image] * images) + " w8"

    def ids(self, images: int) -> list[int]:
        ids: list[int] = self.tokenizer.encode(self.prompt(images))
        return ids


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL, deepstack included."""
    folder = tmp_path_factory.mktemp("checkpoints") / "qwen3_vl"
    command = [PYTHON, "-m", "vitwire_server", "demo-checkpoint", "--model-type", "qwen3_vl", "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def sglang(checkpoint: Path) -> SGLang:
    """SGLang set up as a language-only server would be."""
    server_args = ServerArgs(
        model_path=str(checkpoint),
        language_only=True,
        encoder_urls=["http://127.0.0.1:1"],
        encoder_transfer_backend="zmq_to_tokenizer",
        device="cpu",
        host="127.0.0.1",
    )
    publish(server_args, role="tokenizer")
    config = AutoConfig.from_pretrained(checkpoint)
    special = {
        config.image_token_id: "<|image_pad|>",
        config.video_token_id: "<|video_pad|>",
        config.vision_start_token_id: "<|vision_start|>",
        config.vision_end_token_id: "<|vision_end|>",
    }
    vocabulary = {special.get(index, f"w{index}"): index for index in range(config.text_config.vocab_size)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special.values())})
    parts = SimpleNamespace(tokenizer=tokenizer, image_processor=None)
    processor = QwenVLImageProcessor(config, server_args, parts, determine_tensor_transport_mode(), skip_mm_pool=True)
    return SGLang(server_args, config, processor, tokenizer)


vitwire = entered(lambda checkpoint: serving(checkpoint, "--graphs", "off", "--dtype", "bfloat16"), scope="session")
"""A server of the checkpoint."""

adapter = entered(lambda vitwire: adapting(vitwire.target))


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Images of several sizes and formats."""
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(7)
    paths = []
    for index, (width, height, suffix) in enumerate([(96, 64, "png"), (64, 160, "jpg"), (128, 96, "webp")]):
        path = folder / f"{index}.{suffix}"
        Image.fromarray(generator.integers(0, 256, (height, width, 3), np.uint8)).save(path)
        paths.append(path)
    return paths


@pytest.fixture(scope="session")
def embeddings(vitwire: ServerProcess, images: list[Path]) -> list[Embedding]:
    with Client(vitwire.target) as client:
        return client.encode_images(images)
