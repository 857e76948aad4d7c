"""Content parts of the engines: the place of an image in the request that an engine gets."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vitwire.router.encoding import Encoded
from vitwire.router.settings import Engine, Mode

Part = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one engine takes images."""

    part: Callable[[Encoded], Part]
    """The content part. Raises ValueError for a model or an embedding that the engine has no input for."""
    by_reference: bool
    """Whether the engine fetches the embedding by its content id."""


def dialect_of(engine: Engine, mode: Mode) -> Dialect:
    """The dialect of `--engine` and `--mode`. Raises ValueError for a combination that the engine does not have."""
    if engine == "vllm":
        from vitwire.integrations import vllm  # noqa: PLC0415  # only for this engine

        if mode == "inline":
            return Dialect(lambda each: vllm.image_part(each.embedding, each.model, uuid=each.content_id), False)
        return Dialect(lambda each: vllm.reference_part(each.embedding.grid, each.model, each.content_id), True)
    raise ValueError(
        "SGLang's chat API takes no embeddings: start SGLang with --language-only and `vitwire sglang-encoder` as its"
        " encoder; then its clients need no router"
    )
