"""The models that tests run over, and the fixture that writes their checkpoints."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version

from vitwire_server.towers.registry import FAMILIES

_INSTALLED = Version(transformers.__version__)
MODEL_TYPES = [name for name, row in FAMILIES.items() if Version(row.transformers) <= _INSTALLED]
"""Rows of the table that the installed transformers can compute."""
EVERYDAY = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "glm4v",
    "kimi_k25",
    "paddleocr_vl",
    "minimax_m3_vl",
    "lfm3_vl",
    "minicpmv4_6",
    "nemotron_h_omni",
    "ernie4_5_vl_moe",
    "video_llama_3",
    "idefics2",
    "internvl_chat",
    "llava_next",
    "gemma3",
    "gemma4",
    "deepseek_vl_hybrid",
    "deepseek_ocr2",
    "llama4",
    "mllama",
    "step3p7",
    "mistral3",
    "minicpmv",
    "siglip2",
    "clip",
)
"""A row for each mechanism; the others are computed in the matrix tier."""


def sampled(names: Iterable[str]) -> list[Any]:
    """Values of `parametrize`: rows of the table, of which the everyday suite runs one for each mechanism."""
    return [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.matrix) for name in names]


ROWS = sampled(FAMILIES)
Checkpoints = Callable[[str], Path]
"""From a model_type to the directory of its tiny checkpoint."""
graphs_and_packing = pytest.mark.parametrize(
    ("graphs", "packed"),
    [
        pytest.param(False, False, id="off-alone"),
        pytest.param(False, True, id="off-packed", marks=pytest.mark.matrix),
        pytest.param(True, False, id="simulated-alone", marks=pytest.mark.matrix),
        pytest.param(True, True, id="simulated-packed"),
    ],
)
"""Without graphs and with simulated ones; each item alone, and packed with others."""
