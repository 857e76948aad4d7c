"""Content parts in which engines take images and clips: their embeddings, references to these, or the files."""

from base64 import b64encode
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from anyio.to_thread import run_sync

from vitwire_gateway.gateway_settings import Mode, RouterSettings
from vitwire_gateway.images.encoding import Encoder
from vitwire_gateway.images.image_files import ImageFile
from vitwire_gateway.requests.filling import Hole

Part = dict[str, Any]


async def _file(encoder: Encoder, image: ImageFile) -> Part:
    """The file itself, checked."""
    kind = await encoder.media_type(image)
    return {"url": await run_sync(lambda: f"data:{kind};base64,{b64encode(image.content).decode()}")}


async def whole_part(encoder: Encoder, image: ImageFile) -> Part:
    """The part with the file itself, for the engine to encode."""
    field = "image_url" if image.modality == "image" else "video_url"
    return {"type": field, field: await _file(encoder, image)}


MakePart = Callable[[Encoder, ImageFile], Awaitable[Part]]
"""Raises VitwireError, or ValueError for a model that the engine has no such input for."""


class Dialect(NamedTuple):
    """The form in which an engine takes images and clips: `part` makes what `filled` puts into the hole."""

    hole: Hole
    part: MakePart
    has_ids: bool = False
    """The request repeats the uuids of its parts, which vLLM replaces if it has options of media."""
    sized: bool = True
    """The encoder gets a request's options that set the size of images; SGLang requests embeddings without any."""


def mode_of(settings: RouterSettings) -> Mode:
    """`--mode`, or the engine's default."""
    return settings.mode or ("reference" if settings.engine == "sglang" else "inline")


def dialect_of(settings: RouterSettings) -> Dialect:
    """The dialect of `--engine` and `--mode`. Raises ValueError for a mode that the engine does not have."""
    mode = mode_of(settings)
    if settings.engine == "sglang":  # which requests embeddings by SGLang's protocol
        if mode == "inline":
            raise ValueError("--mode inline: SGLang's chat API takes no embeddings; use --mode reference with SGLang")
        if settings.on_encoder_failure == "engine":
            raise ValueError("--on-encoder-failure engine: SGLang requests embeddings itself; leave it out with SGLang")
        return Dialect("url", _file, sized=False)
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

    return Dialect("part", reference, has_ids=True) if mode == "reference" else Dialect("part", inline)
