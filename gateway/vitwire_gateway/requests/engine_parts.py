"""Content parts in which vLLM takes images and clips: their embeddings, references to these, or the files."""

from base64 import b64encode
from collections.abc import Awaitable, Callable
from typing import Any

from anyio.to_thread import run_sync

from vitwire_gateway.gateway_settings import Mode
from vitwire_gateway.images.encoding import Encoder
from vitwire_gateway.images.image_files import ImageFile

Part = dict[str, Any]


async def whole_part(encoder: Encoder, image: ImageFile) -> Part:
    """The part with the file itself, checked, for the engine to encode."""
    field = "image_url" if image.modality == "image" else "video_url"
    kind = await encoder.media_type(image)
    return {
        "type": field,
        field: {"url": await run_sync(lambda: f"data:{kind};base64,{b64encode(image.content).decode()}")},
    }


MakePart = Callable[[Encoder, ImageFile], Awaitable[Part]]
"""Raises VitwireError, or ValueError for a model that the engine has no such input for."""


def part_of(mode: Mode) -> MakePart:
    """What makes the part of an image or clip; in mode `reference` it has a `uuid`."""
    from vitwire.integrations.vllm import parts  # noqa: PLC0415  # only with an engine

    async def inline(encoder: Encoder, image: ImageFile) -> Part:
        if image.modality == "video":
            parts.check_clips(await encoder.model.get())
        content_id, embedding, model = await encoder.encode(image)
        make = parts.unencoded_image_part if image.modality == "image" else parts.unencoded_video_part
        return await run_sync(lambda: make(embedding, model, uuid=content_id))

    async def reference(encoder: Encoder, image: ImageFile) -> Part:
        if image.modality == "video":
            parts.check_clips(await encoder.model.get())
        content_id, grid, model, times = await encoder.store(image)
        seconds = model.group_seconds(times.frame_seconds)
        kind, interval = image.modality, times.second_per_grid
        return parts.reference_part(
            grid, model, content_id, modality=kind, timestamps=seconds, second_per_grid=interval
        )

    return reference if mode == "reference" else inline
