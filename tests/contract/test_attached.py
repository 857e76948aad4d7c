"""Every model that transformers generates with gives the same tokens when its tower is a server's."""

import pytest
from transformers import CONFIG_MAPPING

from checkpoints import MODEL_TYPES, Checkpoints
from vitwire.integrations.transformers._layouts import LAYOUTS, tower_type
from vitwire_server.towers.registry import FAMILIES
from vlms import TowerEncoder, assert_generates_alike, language_model

EVERYDAY = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "glm4v",
    "internvl",
    "llava_onevision",
    "gemma3",
)
WHOLE = [name for name in MODEL_TYPES if name in CONFIG_MAPPING and name != "siglip2"]
"""Those with a language model, in a layout that transformers reads."""


@pytest.mark.parametrize(
    "model_type", [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.matrix) for name in WHOLE]
)
def test_the_same_tokens_with_the_tower_of_a_server(model_type: str, checkpoints: Checkpoints) -> None:
    folder = checkpoints(model_type)
    assert_generates_alike(language_model(model_type, folder), TowerEncoder(folder))


def test_every_model_that_generates_has_a_layout() -> None:
    assert {name for name in FAMILIES if tower_type(name) not in LAYOUTS} == {"kimi_vl", "siglip2"}
    assert FAMILIES.keys() >= LAYOUTS.keys()
