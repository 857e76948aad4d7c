"""How engines take images: the content part that takes the place of an image in the engine's request."""

from base64 import b64encode
from collections.abc import Callable
from typing import Any, Protocol

from vitwire_gateway.openai.encoding import Encoded, Encoder, ImageFile
from vitwire_gateway.openai.rewriting import Hole
from vitwire_gateway.openai.settings import Mode, Settings
from vitwire_gateway.openai.storing import Referenced

Part = dict[str, Any]


class Dialect(Protocol):
    """One way in which an engine takes images."""

    hole: Hole

    async def part(self, image: ImageFile, encoder: Encoder) -> Part:
        """What `filled` puts into the hole for an image.

        Raises VitwireError, or ValueError for a model that the engine has no such input for.
        """


class Inline:
    """The request carries the embedding."""

    hole: Hole = "part"

    def __init__(self, make: Callable[[Encoded], Part]) -> None:
        self._make = make

    async def part(self, image: ImageFile, encoder: Encoder) -> Part:
        """Raises as `Dialect.part`."""
        encoded = await encoder.encode(image)
        return await encoder.in_thread(lambda: self._make(encoded))


class Reference:
    """The request carries the content id, by which the engine fetches the embedding from Vitwire's cache."""

    hole: Hole = "part"

    def __init__(self, make: Callable[[Referenced], Part]) -> None:
        self._make = make

    async def part(self, image: ImageFile, encoder: Encoder) -> Part:
        """Raises as `Dialect.part`."""
        return self._make(await encoder.store(image))


class PassOn:
    """The request carries the image, checked; the engine requests its embedding from an encoder of its own protocol."""

    hole: Hole = "image"

    async def part(self, image: ImageFile, encoder: Encoder) -> Part:
        """Raises as `Dialect.part`."""
        kind = (await encoder.header(image)).kind
        return {"url": await encoder.in_thread(lambda: _data_uri(kind, image.content))}


class Unchanged:
    """The request carries the image, checked, in place of its embedding: the engine encodes it."""

    hole: Hole = "part"

    async def part(self, image: ImageFile, encoder: Encoder) -> Part:
        """Raises as `Dialect.part`."""
        return {"type": "image_url", "image_url": await PassOn().part(image, encoder)}


def mode_of(settings: Settings) -> Mode:
    """`--mode`, or the engine's default."""
    return settings.mode or ("reference" if settings.engine == "sglang" else "inline")


def dialect_of(settings: Settings) -> Dialect:
    """The dialect of `--engine` and `--mode`. Raises ValueError for a mode that the engine does not have."""
    mode = mode_of(settings)
    if settings.engine == "sglang":
        if mode == "inline":
            raise ValueError("--mode inline: SGLang's chat API takes no embeddings; use --mode reference with SGLang")
        if settings.on_encoder_failure == "engine":
            raise ValueError("--on-encoder-failure engine: SGLang requests embeddings itself; leave it out with SGLang")
        return PassOn()
    from vitwire.integrations.vllm import parts  # noqa: PLC0415  # only for this engine

    if mode == "inline":
        return Inline(lambda each: parts.unencoded_image_part(each.embedding, each.model, uuid=each.content_id))
    return Reference(lambda each: parts.reference_part(each.grid, each.model, each.content_id))


def _data_uri(kind: str, content: bytes) -> str:
    name = "jpeg" if kind == "MPO" else kind.lower()  # a camera's JPEG with further pictures
    return f"data:image/{name};base64,{b64encode(content).decode()}"
