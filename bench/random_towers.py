"""A published tower of another maker than Qwen with random weights, and its stock model, both built on a device."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from bench.stock import Plain
from packaging.version import Version
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from vitwire_server.core.grids import Grid
from vitwire_server.core.pooling import Pooling
from vitwire_server.demo.saving import write_json
from vitwire_server.demo.shrinking import STEPS, Json
from vitwire_server.towers.checkpoints.checkpoint import open_checkpoint
from vitwire_server.towers.configs import Config
from vitwire_server.towers.family import Module
from vitwire_server.towers.tower import Tower

_TEXT: Json = {
    "vocab_size": 512,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE_TOKEN: Json = {"image_token_index": 500}
TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"
"""Where most stock models have them."""
_TINY: Json = {
    **dict.fromkeys(("depth", "num_hidden_layers", "num_heads", "num_attention_heads", "attention_heads"), 2),
    **dict.fromkeys(("hidden_size", "out_hidden_size"), 128),
    "intermediate_size": 256,
    "num_global_layers": 1,
    "intermediate_layers_indices": [0],
    "vision_output_dim": 256,
}
"""Fields of a small tower, of those that a configuration has."""
_TINY_WIDTH, _TINY_BATCH = 128, 2
_AUTOMATIC: Any = AutoModel


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherTower:
    """A published tower and one size of image: the files of its checkpoint, and its forward in plain transformers."""

    model_type: str
    vision: Json
    """`vision_config`; of an encoder that is alone, all of config.json."""
    width: int = 0
    """Columns of the language model, which is not built in full; 0 without one."""
    text: Json = field(default_factory=dict)
    """Other fields of `text_config`."""
    fields: Json = field(default_factory=lambda: dict(IMAGE_TOKEN))
    """Other fields of config.json."""
    image: Json
    """preprocessor_config.json."""
    grid: Grid
    """The grid of one image."""
    plain: Plain
    """How plain transformers computes rows."""
    parts: Mapping[str, str] = field(default_factory=lambda: {"tower": TOWER, "projector": PROJECTOR})
    """Where the stock model has each module of the row."""
    pooling: Pooling = Pooling.NONE
    batch: int = 16
    """Images of a packed batch."""
    transformers: str = "5.17.0"
    """Oldest release whose stock model is right in bfloat16."""

    def config(self) -> Json:
        """config.json."""
        if not self.width:
            return {**self.vision, "model_type": self.model_type}
        text = {**_TEXT, "hidden_size": self.width, "num_hidden_layers": 1, **self.text}
        return {"model_type": self.model_type, "text_config": text, "vision_config": dict(self.vision), **self.fields}


@dataclass(frozen=True, slots=True)
class RandomTower:
    """A tower and the stock model with the same weights."""

    model: Any
    """What `OtherTower.plain` takes."""
    tower: Tower
    weights_nbytes: int
    """Bytes of the tower's weights, those of its projector included."""


def shrunk(other: OtherTower) -> OtherTower:
    """The same tower with two layers of few columns, and images of the same size."""
    vision = {name: _TINY.get(name, value) for name, value in other.vision.items()}
    return replace(other, vision=vision, width=_TINY_WIDTH if other.width else 0, batch=_TINY_BATCH)


def random_tower(other: OtherTower, dtype: torch.dtype, device: torch.device) -> RandomTower:
    """Built in `dtype`, never cast to it, so that rotary frequencies stay float32.

    Raises CheckpointError or ValueError if this release of transformers is too old for it.
    """
    if Version(transformers.__version__) < Version(other.transformers):
        raise ValueError(f"needs transformers {other.transformers}, {transformers.__version__} is installed")
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_json(folder / "config.json", other.config())
        write_json(folder / "preprocessor_config.json", {**STEPS, **other.image})
        checkpoint = open_checkpoint(name).pooled(other.pooling)
        config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = _AUTOMATIC.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model = model.to(device).eval().requires_grad_(requires_grad=False)
    _randomise(model)
    parts = {
        name: _part(module, checkpoint.config, model.get_submodule(other.parts[name]), dtype, device)
        for name, module in checkpoint.family.modules.items()
    }
    weights = sum(weight.nbytes for part in parts.values() for weight in part.parameters())
    return RandomTower(model, checkpoint.family.build(parts, checkpoint.config), weights)


def _part(module: Module, config: Config, source: nn.Module, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A module of the row with the weights of the stock one. Raises ValueError if that lacks any."""
    part = _new(module, config, dtype, device)
    missing = part.load_state_dict(source.state_dict(), strict=False).missing_keys
    if missing:
        raise ValueError(f"the stock model has no {', '.join(missing[:3])}")
    return part


def _new(module: Module, config: Config, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """A module with the weights that it is initialised with."""
    source: Any = module.resolve()
    own = module.configuration(config)
    with torch.device(device):
        if issubclass(source, PreTrainedModel):
            made: nn.Module = source._from_config(own, dtype=dtype, attn_implementation="sdpa")
        else:
            made = module.make(own)
            for parameter in made.parameters():
                parameter.data = parameter.data.to(dtype)
    return made.to(device).eval().requires_grad_(requires_grad=False)


@torch.no_grad()
def _randomise(model: nn.Module) -> None:
    """Weights that keep the variance of what flows through, so that attention and positions matter."""
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.normal_(std=weight[0].numel() ** -0.5)
        else:
            weight.add_(torch.randn_like(weight), alpha=0.1)
