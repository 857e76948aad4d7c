"""Whole vision-language models that generate, local and attached to an encoder."""

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoModelForMultimodalLM

from client_models import client_model
from prompts import TOKENS, Inputs, clip, images, prompt
from reference import as_published
from rigs import Rig
from vitwire import Embedding, Item, Model
from vitwire.embeddings import Report
from vitwire.integrations.transformers import Encoder, attach, detach
from vitwire.integrations.transformers._attach import OLDEST
from vitwire_server.core.grids import Grid

_MULTIMODAL = {"qwen2_5_omni", "qwen3_omni_moe", "diffusion_gemma", "phi4_multimodal", "nemotron_h_omni"}
ANSWERLESS = (
    "siglip2",
    "colqwen2",
    "embedding_gemma2",
    "diffusion_gemma",
    "pix2struct",
    "shieldgemma2",
    "t5gemma2_encoder",
    "colpali",
    "modernvbert",
    "colmodernvbert",
    "ultravbert",
)
"""Models that do not write one token after the other."""
_NO_CLIPS = ("nemotron_h_omni",)
"""Models whose clips have weights that the service does not hold."""
_SETTINGS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}


def language_model(model_type: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The part that generates text: of omni models the thinker, as audio needs voices that are files of their own.

    It skips where the installed transformers is too old to attach an encoder.
    """
    if Version(transformers.__version__) < OLDEST:
        pytest.skip(f"attach needs transformers {OLDEST}, {transformers.__version__} is installed")
    auto: Any = AutoModelForMultimodalLM if model_type in _MULTIMODAL else AutoModelForImageTextToText
    model = as_published(auto.from_pretrained(folder, dtype=dtype).eval())
    model = getattr(model, "thinker", model)
    if model_type == "kimi_k25":
        model.model.get_video_features = MethodType(_kimi_clips, model.model)
    return model


def _kimi_clips(model: Any, pixel_values_videos: Tensor, video_grid_thw: Tensor, **_: object) -> Any:
    """transformers' own counts the tokens of all frames, which were averaged."""
    output = model.vision_tower(pixel_values_videos, grid_thw=video_grid_thw)
    rows = model.mm_projector(output.pooler_output).squeeze(1)
    output.pooler_output = rows.split((video_grid_thw[:, 1:].prod(-1) // 4).tolist())
    return output


def owner_of(model: Any) -> Any:
    """The module whose feature methods its forward calls."""
    inner = getattr(model, "model", None)
    inner = getattr(inner, "encoder", inner)
    return inner if hasattr(inner, "get_image_features") else model


def cases(model: Any) -> Iterator[tuple[str, Inputs]]:
    """Several images in a prompt, prompts with different numbers of images in a batch, a clip, images and a clip."""
    owner = owner_of(model)
    config, pictures = owner.config, images(owner.config)
    counts = pictures.counts(owner)
    whole = None
    if "batch_num_images" in pictures.arguments:  # images of one prompt would be cut in another way
        yield "batch", prompt(config, pictures, [[count] for count in counts])
    else:
        whole = prompt(config, pictures, [counts])
        yield "images", whole
        yield "batch", prompt(config, pictures, [counts[:1], counts[1:]])
    if hasattr(owner, "get_video_features") and config.model_type not in _NO_CLIPS:
        pictures = clip(config)
        alone = prompt(config, pictures, [pictures.counts(owner)])
        yield "clip", alone
        if whole and not config.model_type.startswith("glm"):  # whose placeholders are the same for both
            both = {name: torch.cat([whole[name], alone[name]], 1) for name in TOKENS}
            yield "images and clip", {**whole, **alone, **both}


def generated(model: Any, inputs: Inputs) -> list[list[int]]:
    """Tokens of the prompts and of their answers."""
    taken = inspect.signature(model.forward).parameters.keys()
    tokens = model.generate(**{name: value for name, value in inputs.items() if name in taken}, **_SETTINGS)
    return tokens.tolist()  # type: ignore[no-any-return]


def assert_generates_alike(model: Any, encoder: Encoder | str) -> None:
    """Every case: the same tokens with the tower remote, which depend on the pixels, and again once it is local."""
    wanted = [(name, inputs, generated(model, inputs)) for name, inputs in cases(model)]
    weights = sum(weight.numel() for weight in model.parameters())
    attach(model, encoder)
    try:
        assert sum(weight.numel() for weight in model.parameters()) < weights
        for name, inputs, tokens in wanted:
            assert generated(model, inputs) == tokens, name
            blind = {key: torch.zeros_like(value) if "pixel_values" in key else value for key, value in inputs.items()}
            assert generated(model, blind) != tokens, f"{name}: the tokens depend on the pixels"
    finally:
        detach(model)
    assert sum(weight.numel() for weight in model.parameters()) == weights
    name, inputs, tokens = wanted[0]
    assert generated(model, inputs) == tokens, f"{name}: detach restores the tower"


class TowerEncoder:
    """A server's tower in this process, as a client of it would answer."""

    def __init__(self, folder: Path) -> None:
        self._rig = Rig.of(folder, torch.float32, torch.device("cpu"), sizes=())
        self._described = client_model(folder)
        self.items: list[Item] = []

    def model(self) -> Model:
        """See Client."""
        return self._described

    def encode(self, items: Sequence[Item]) -> list[Embedding]:
        """See Client. Items that a server would refuse fail."""
        self.items += items
        own = []
        for item in items:
            grid = Grid(*item.grid)
            assert isinstance(item.pixels, Tensor)
            geometry, crops = self._rig.tower.geometry, item.crops
            assert not list(geometry.wrong(grid, self._rig.modality(grid)))
            assert tuple(item.pixels.shape) in geometry.shapes(grid, self._rig.modality(grid))
            assert crops is None or isinstance(crops, Tensor)
            assert (tuple(crops.shape) if crops is not None else None) == geometry.crops(grid)
            own.append(self._rig.item(grid, item.pixels.detach().cpu(), crops.cpu() if crops is not None else None))
        levels = self._described.deepstack_levels
        return [Embedding(rows, "float32", levels, Report()) for rows in self._rig.run(own)]
