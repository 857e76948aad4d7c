"""The checkpoint of a demo model: random weights of a fixed seed, in the layout that its authors publish."""

import stat
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForMultimodalLM,
    AutoModelForPreTraining,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from vitwire_server.demo.models import DEMO_MODELS, DemoModel
from vitwire_server.demo.saving import write_json
from vitwire_server.demo.shrinking import Json, image_settings, shrunk, video_settings
from vitwire_server.towers.family import Accepts
from vitwire_server.towers.registry import FAMILIES

_AUTOMATIC: tuple[Any, ...] = (
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForPreTraining,
    AutoModelForMaskedLM,
    AutoModel,
)


def write_demo_checkpoint(model_type: str, out: Path, *, seed: int = 0) -> None:
    """Write a tiny VLM of this type: sharded safetensors in bfloat16, index, processor settings.

    It has the layout that its authors publish; without classes in transformers it has no LLM. The same arguments write
    the same bytes. Files have the mode that the umask gives. Raises ValueError for a type without a tiny model.
    """
    if model_type not in DEMO_MODELS:
        raise ValueError(f"no demo checkpoint of model_type {model_type!r}; choose from {', '.join(DEMO_MODELS)}")
    demo = DEMO_MODELS[model_type]
    out.mkdir(parents=True, exist_ok=True)
    demo.save(random_model(model_type, seed), out)
    for name, content in (_processor_files(model_type, demo) if demo.files is None else demo.files).items():
        write_json(out / name, content)
    mode = (out / "config.json").stat().st_mode
    for path in out.glob("*.safetensors"):  # which safetensors makes readable by their owner alone
        path.chmod(stat.S_IMODE(mode))


def _processor_files(model_type: str, demo: DemoModel) -> Mapping[str, Json]:
    base = demo.base or model_type
    named, family = demo.processor or base, FAMILIES[base]
    image = image_settings(named, family, demo_config(model_type), demo.image)
    clips = FAMILIES[model_type].videos is not Accepts.NOTHING
    video = video_settings(named, family, image, demo.video) if clips else {}
    files = {"preprocessor_config.json": image, "video_preprocessor_config.json": video}
    return {name: settings for name, settings in files.items() if settings}


def demo_config(model_type: str) -> PreTrainedConfig:
    """The configuration of the model that is built for a demo checkpoint of this type."""
    demo = DEMO_MODELS[model_type]
    if demo.published:
        return FAMILIES[model_type].configuration(Path(), demo.published)  # type: ignore[return-value]
    kind = CONFIG_MAPPING[demo.base or model_type]
    return kind(**shrunk(kind, deepcopy(demo.config)))


def random_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """The whole model of a demo checkpoint of this type, in bfloat16."""
    config = demo_config(model_type)
    automatic = (each.from_config for each in _AUTOMATIC if type(config) in each._model_mapping)  # noqa: SLF001
    build = DEMO_MODELS[model_type].build or next(automatic)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # `randomise` adds to what transformers draws
        model: PreTrainedModel = build(config, dtype=torch.bfloat16)
    randomise(model, seed)
    if model.can_generate():
        model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return model


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Weights that keep the variance of what flows through, so that attention and positions matter."""
    generator = torch.Generator().manual_seed(seed)
    for _, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if weight.ndim > 1:
            weight.copy_(noise * weight[0].numel() ** -0.5)
        else:
            weight.add_(noise.to(weight.dtype), alpha=0.1)
