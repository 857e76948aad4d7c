"""A whole VLM whose tower is a server's generates the same tokens."""

from collections.abc import Iterator
from typing import Any

import pytest

from checkpoints import Checkpoints
from servers import ServerProcess, serving
from vitwire import Client
from vitwire.integrations.transformers import attach, detach
from vitwire.integrations.transformers._layouts import LAYOUTS
from vlms import ANSWERLESS, assert_generates_alike, cases, generated, language_model

EVERYDAY = ("qwen3_vl", "llava_onevision")


@pytest.fixture(
    scope="module",
    params=[
        name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.matrix)
        for name, layout in LAYOUTS.items()
        if not layout.replaces and name not in ANSWERLESS
    ],
)
def served(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Iterator[tuple[Any, ServerProcess]]:
    """A local VLM in float32, and a server of the same checkpoint."""
    model = language_model(request.param, checkpoints(request.param))
    flags = ("--dtype", "float32", "--graphs", "simulated", "--max-budget-tokens", "64")
    with serving(checkpoints(request.param), *flags) as process:
        yield model, process


def test_the_same_tokens_with_a_remote_tower(served: tuple[Any, ServerProcess]) -> None:
    model, process = served
    with Client(process.target) as client:
        assert_generates_alike(model, client)


def test_a_target_is_connected_to(served: tuple[Any, ServerProcess]) -> None:
    model, process = served
    _, inputs = next(cases(model))
    tokens = generated(model, inputs)
    attach(model, process.target)
    assert generated(model, inputs) == tokens
    detach(model)
    assert generated(model, inputs) == tokens
