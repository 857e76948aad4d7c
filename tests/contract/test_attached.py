"""Every model that transformers generates with gives the same tokens when its tower is a server's."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForImageTextToText

from checkpoints import MODEL_TYPES, Checkpoints
from vitwire.integrations.transformers import attach
from vitwire.integrations.transformers._layouts import LAYOUTS, tower_type
from vitwire_server.towers.registry import FAMILIES
from vlms import ANSWERLESS, TowerEncoder, assert_generates_alike, cases, generated, language_model

EVERYDAY = ("qwen2_vl", "qwen2_5_vl", "qwen3_5", "glm4v", "internvl", "gemma3")
"""Qwen3-VL and LLaVA-OneVision generate with real servers, in tests/e2e."""
MODULES = {name for name in LAYOUTS if LAYOUTS[name].replaces}
"""Those without feature methods: tests/contract/test_attached_modules.py."""
WHOLE = [
    name
    for name, row in FAMILIES.items()
    if name in MODEL_TYPES
    and row.model_type in CONFIG_MAPPING
    and not row.poolers
    and name not in {*ANSWERLESS, *MODULES}
]
"""Those with a language model, in a layout that transformers reads."""


@pytest.mark.parametrize(
    "model_type", [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.matrix) for name in WHOLE]
)
def test_the_same_tokens_with_the_tower_of_a_server(model_type: str, checkpoints: Checkpoints) -> None:
    folder = checkpoints(model_type)
    assert_generates_alike(language_model(model_type, folder), TowerEncoder(folder))


@pytest.mark.parametrize(
    ("model_type", "layers"),
    [("qwen3_vl", "depth"), pytest.param("internvl", "num_hidden_layers", marks=pytest.mark.matrix)],
)
def test_a_model_can_be_loaded_without_its_tower(model_type: str, layers: str, checkpoints: Checkpoints) -> None:
    folder = checkpoints(model_type)
    local = language_model(model_type, folder)
    _, inputs = next(cases(local))
    config = AutoConfig.from_pretrained(folder)
    setattr(config.vision_config, layers, 0)
    auto: Any = AutoModelForImageTextToText
    model = auto.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    attach(model, TowerEncoder(folder), keep=False)
    assert generated(model, inputs) == generated(local, inputs)


def test_every_model_that_generates_has_a_layout() -> None:
    without = {
        row.model_type for row in FAMILIES.values() if tower_type(row.model_type) not in LAYOUTS and not row.poolers
    }
    assert {name for name in without if name in CONFIG_MAPPING} == {
        "colmodernvbert",
        "colpali",
        "colqwen2",
        "embedding_gemma2",
        "modernvbert",
        "pix2struct",
        "shieldgemma2",
        "ultravbert",
    }
    assert FAMILIES.keys() >= LAYOUTS.keys()
