"""Content parts in which engines take images and clips: their embeddings, references to these, or the files."""

from base64 import b64encode
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple

from anyio.to_thread import run_sync

from vitwire_gateway.gateway_settings import Mode, RouterSettings
from vitwire_gateway.images.encoding import Encoder
from vitwire_gateway.images.image_files import ImageFile
from vitwire_gateway.requests.filling import Hole

Part = dict[str, Any]
Api = Literal["chat", "responses", "messages"]
"""APIs whose requests may have images."""


async def _file(encoder: Encoder, image: ImageFile) -> Part:
    """The file itself, checked."""
    kind = await encoder.media_type(image)
    return {"url": await run_sync(lambda: f"data:{kind};base64,{b64encode(image.content).decode()}")}


async def _whole(encoder: Encoder, image: ImageFile) -> Part:
    field = "image_url" if image.modality == "image" else "video_url"
    return {"type": field, field: await _file(encoder, image)}


async def _input_image(encoder: Encoder, image: ImageFile) -> Part:
    return {"image_url": (await _file(encoder, image))["url"]}


async def _source(encoder: Encoder, image: ImageFile) -> Part:
    kind = await encoder.media_type(image)
    content = await run_sync(lambda: b64encode(image.content).decode())
    return {"type": "base64", "media_type": kind, "data": content}


MakePart = Callable[[Encoder, ImageFile], Awaitable[Part]]
"""Raises VitwireError, or ValueError for a model that the engine has no such input for."""


class Dialect(NamedTuple):
    """The form in which an engine takes images and clips: `part` makes what `filled` puts into the hole."""

    hole: Hole
    part: MakePart
    unchanged: MakePart = _whole
    """The file itself, for the engine to encode."""
    has_ids: bool = False
    """The request repeats the uuids of its parts, which vLLM replaces if it has options of media."""


def mode_of(settings: RouterSettings) -> Mode:
    """`--mode`, or the engine's default."""
    return settings.mode or ("reference" if settings.engine == "sglang" else "inline")


def dialect_of(settings: RouterSettings, api: Api = "chat") -> Dialect:
    """The dialect of `--engine` and `--mode`. Raises ValueError for a mode that the engine does not have.

    vLLM gets requests for messages as chat requests.
    """
    mode = mode_of(settings)
    if settings.engine == "sglang":  # which requests embeddings by SGLang's protocol
        if mode == "inline":
            raise ValueError("--mode inline: SGLang's chat API takes no embeddings; use --mode reference with SGLang")
        if settings.on_encoder_failure == "engine":
            raise ValueError("--on-encoder-failure engine: SGLang requests embeddings itself; leave it out with SGLang")
        taken: dict[Api, Dialect] = {
            "chat": Dialect("image", _file),
            "responses": Dialect("input_image", _input_image),
            "messages": Dialect("source", _source),
        }
        return taken[api]
    from vitwire.integrations.vllm import parts  # noqa: PLC0415  # only for this engine

    async def inline(encoder: Encoder, image: ImageFile) -> Part:
        if image.modality == "video":
            parts.check_clips(await encoder.model.get())
        content_id, embedding, model = await encoder.encode(image)
        part_of = parts.unencoded_image_part if image.modality == "image" else parts.unencoded_video_part
        return await run_sync(lambda: part_of(embedding, model, uuid=content_id))

    async def reference(encoder: Encoder, image: ImageFile) -> Part:
        if image.modality == "video":
            parts.check_clips(await encoder.model.get())
        content_id, grid, model, times = await encoder.store(image)
        seconds = model.group_seconds(times.frame_seconds)
        kind, interval = image.modality, times.second_per_grid
        return parts.reference_part(
            grid, model, content_id, modality=kind, timestamps=seconds, second_per_grid=interval
        )

    part = inline if mode == "inline" else reference
    if api != "responses":
        return Dialect("part", part, has_ids=mode == "reference")

    async def input_image(encoder: Encoder, image: ImageFile) -> Part:
        """vLLM keeps these fields, and reads an image without `image_url` but with `uuid` by them."""
        return {name: value for name, value in (await part(encoder, image)).items() if name != "type"}

    return Dialect("input_image", input_image, _input_image, mode == "reference")
