"""Routes of a request's images into an engine: encoded there, as embeddings inline, or by reference to a server."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from bench.engine import vllm_engine
from bench.engine.answers import Answer
from bench.engine.checkpoint import SPECIAL
from bench.engine.requests import Asked
from bench.engine.sending import Sender

from vitwire import AsyncClient
from vitwire.integrations.vllm import image_embeds


@dataclass(slots=True)
class Route(ABC):
    """Makes inputs of an engine. `front` is vLLM's front end: an `AsyncLLM`, or an `InputProcessor`."""

    front: Any

    @abstractmethod
    async def prepare(self, asked: Asked, name: str) -> Any:
        """What precedes the request: pictures become patches. `name` differs for each request of a run."""

    @abstractmethod
    async def inputs(self, asked: Asked, ready: Any, answer: Answer) -> Any:
        """The engine's input; notes the moments of the request."""

    async def answered(self, asked: Asked, ready: Any, name: str, tokens: int) -> Answer:
        """The request, `tokens` long."""
        return await vllm_engine.answered(self, asked, ready, name, tokens)

    async def render(self, asked: Asked, data: Any, names: Sequence[str]) -> Any:
        """As vLLM's API server does. Names keep images apart in its encoder cache."""
        prompt = {"prompt_token_ids": list(asked.prompt), "multi_modal_data": {"image": data}}
        prompt["multi_modal_uuids"] = {"image": list(names)}
        (rendered,) = await self.front.renderer.render_cmpl_async([prompt])
        return rendered


class Local(Route):
    """The engine's own tower; vLLM's processor has run before."""

    async def prepare(self, asked: Asked, name: str) -> Any:
        return await self.render(asked, list(asked.pictures), _names(name, len(asked.pictures)))

    async def inputs(self, asked: Asked, ready: Any, answer: Answer) -> Any:  # noqa: ARG002  # as declared
        return ready


class Text(Route):
    """No images: text of the same length."""

    async def prepare(self, asked: Asked, name: str) -> Any:  # noqa: ARG002  # as declared
        return await self.render_text(
            asked, len(asked.prompt) + sum(each.width * each.height for each in asked.pictures) // 1024
        )

    async def inputs(self, asked: Asked, ready: Any, answer: Answer) -> Any:  # noqa: ARG002  # as declared
        return ready

    async def render_text(self, asked: Asked, length: int) -> Any:
        """A prompt of `length` tokens."""
        words = list(asked.prompt[: asked.prompt.index(SPECIAL["<|vision_start|>"])])
        tokens = (words * (length // len(words) + 1))[:length]
        (rendered,) = await self.front.renderer.render_cmpl_async([{"prompt_token_ids": tokens}])
        return rendered


@dataclass(slots=True)
class Inline(Route):
    """Embeddings from a server, in the request."""

    client: AsyncClient

    async def prepare(self, asked: Asked, name: str) -> Any:  # noqa: ARG002  # as declared
        return name

    async def inputs(self, asked: Asked, ready: Any, answer: Answer) -> Any:
        embeddings = await self.client.encode(asked.items)
        answer.note_server("encoded", time.monotonic(), [embedding.report for embedding in embeddings])
        data = image_embeds(embeddings, await self.client.model())["image"]
        return await self.render(asked, data, _names(ready, len(embeddings)))


@dataclass(slots=True)
class Reference(Route):
    """The server stores the rows; the request continues once it has accepted the items, and the engine fetches them."""

    sender: Sender

    async def prepare(self, asked: Asked, name: str) -> tuple[str, Any]:
        """The prompt as well: whoever has patches has their grids."""
        names = _names(name, len(asked.items))
        items = [replace(item, content_id=each) for item, each in zip(asked.items, names, strict=True)]
        self.sender.hand_over(name, items)
        return name, await self.render(asked, {"image_grid_thw": torch.tensor([item.grid for item in items])}, names)

    async def inputs(self, asked: Asked, ready: tuple[str, Any], answer: Answer) -> Any:  # noqa: ARG002  # as declared
        name, rendered = ready
        answer.moments["accepted"] = await self.sender.accepted(name, answer)
        return rendered


def _names(name: str, images: int) -> list[str]:
    return [f"{name}-{index}" for index in range(images)]
