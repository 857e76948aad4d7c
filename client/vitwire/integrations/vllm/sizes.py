"""What a model's prompt needs to know of an image or clip, from its header alone, by vLLM's own rules."""

from collections.abc import Mapping
from inspect import signature
from typing import NamedTuple

import torch
from transformers.video_utils import VideoMetadata
from vllm.multimodal.processing import BaseProcessingInfo

from vitwire.integrations.vllm.files import ClipFile
from vitwire.integrations.vllm.parts import WITH_GRIDS, WITHOUT_GRIDS
from vitwire.options import ProcessorOptions

MODELS = frozenset({*WITH_GRIDS, *WITHOUT_GRIDS})
"""Model types whose images the front end gives to the encoder."""
CLIPS = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})
"""Model types whose clips it gives to the encoder."""
_SIZES = frozenset({"min_pixels", "max_pixels", "size"})
"""Options of processors that set the size of an image."""
_MOST_FRAMES = 1 << 14
"""Most frames of a clip that the server takes."""
_EDGES = frozenset({"shortest_edge", "longest_edge"})
_ON_DEVICE = frozenset({"do_normalize", "do_rescale"})
"""vLLM sets these itself when its tower normalises on the device."""
_OTHERS = frozenset({"fps", "num_frames", "do_sample_frames", "videos_kwargs", "audio_kwargs"})
"""Options that do not concern images."""


class Sized(NamedTuple):
    """An image or clip in a prompt."""

    tokens: int
    """Places of its embedding."""
    fields: Mapping[str, object]
    """The processor's outputs without pixels."""
    options: ProcessorOptions | None = None
    """For the encoder, so that it makes the same of it: areas of an image, frames of a clip."""


def may_encode(info: BaseProcessingInfo, options: Mapping[str, object]) -> bool:
    """Whether the processor's options, of server and request, at most change the size of images.

    The encoder has no other options.
    """
    return _has_only(info, options, "images_kwargs", _SIZES, _OTHERS)


def _has_only(
    info: BaseProcessingInfo,
    options: Mapping[str, object],
    scope: str,
    known: frozenset[str],
    others: frozenset[str],
) -> bool:
    """Whether the merged options have only known ones in a scope, and beside it only those that do not concern it."""
    merged = info._merge_and_resolve_mm_processor_kwargs(options)  # noqa: SLF001  # as vLLM's own size rule
    merged = {name: value for name, value in merged.items() if value not in (None, {})}
    scoped = merged.pop(scope, {})
    if not all(isinstance(each, Mapping) for name, each in merged.items() if name.endswith("_kwargs")):
        return False
    device = _ON_DEVICE if info.ctx.get_mm_config().mm_device_do_normalize else frozenset()
    return merged.keys() <= known | others | device and scoped.keys() <= known | device


def sized(info: BaseProcessingInfo, size: tuple[int, int], options: Mapping[str, object]) -> Sized:
    """The tokens and fields of an image.

    info: vLLM's `ProcessingInfo` of a model of `MODELS`.
    size: width and height in pixels.
    options: `mm_processor_kwargs` of the request. Raises as vLLM does for impossible ones.
    """
    width, height = size
    vision = info.get_hf_config().vision_config
    if info.ctx.model_config.hf_config.model_type in WITHOUT_GRIDS:
        processor = info.get_hf_processor(**options)
        named = {"mm_kwargs": options} if "mm_kwargs" in signature(info.get_num_image_tokens).parameters else {}
        tokens = info.get_num_image_tokens(image_width=width, image_height=height, processor=processor, **named)
        return Sized(tokens, {"image_num_patches": torch.tensor(tokens // processor.image_seq_length)})
    resized, tokens = info._get_vision_info(  # noqa: SLF001  # the rule that its public methods use
        image_width=width,
        image_height=height,
        num_frames=1,
        image_processor=info.get_image_processor(**options),
        mm_kwargs=options,
        modality="image",
    )
    grid = (1, resized.height // vision.patch_size, resized.width // vision.patch_size)
    return Sized(tokens, {"image_grid_thw": torch.tensor(grid)}, _areas(info, options))


def _areas(info: BaseProcessingInfo, options: Mapping[str, object]) -> ProcessorOptions | None:
    """The bounds of an image's area, if options of the engine or the request set them."""
    scoped = info._merge_and_resolve_mm_processor_kwargs(options).get("images_kwargs", {})  # noqa: SLF001  # as above
    if not scoped.keys() & _SIZES:
        return None
    given = scoped.get("size")
    if given is not None and not (isinstance(given, Mapping) and given.keys() <= _EDGES):
        raise ValueError("vLLM says what is wrong")
    size = info._get_vision_size(scoped, default_size=info.get_image_processor().size)  # noqa: SLF001  # as above
    return ProcessorOptions(min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"])


def sized_clip(info: BaseProcessingInfo, clip: ClipFile, options: Mapping[str, object]) -> Sized | None:
    """As `sized`; the number of tokens includes no timestamps. None for options of the processor, not of the loader.

    info: vLLM's `ProcessingInfo` of a model of `CLIPS`.
    """
    if not _has_only(info, options, "videos_kwargs", frozenset(), frozenset({"images_kwargs", "audio_kwargs"})):
        return None
    processor, metadata = info.get_hf_processor().video_processor, clip.metadata
    known = VideoMetadata(**{name: value for name, value in metadata.items() if name != "do_sample_frames"})
    frames: list[int] = metadata["frames_indices"]
    fields: dict[str, object] = {}
    if hasattr(info, "_get_video_second_idx"):
        if metadata["do_sample_frames"]:  # the processor chooses again, of all frames
            frames = processor.sample_frames(known).tolist()
        fields["timestamps"] = info._get_video_second_idx(metadata)  # noqa: SLF001  # as above
    elif info.ctx.model_config.hf_config.model_type == "qwen2_5_vl":
        seconds = processor.temporal_patch_size / known.sampled_fps
        fields["second_per_grid_ts"] = torch.tensor(seconds, dtype=info.ctx.model_config.dtype)  # as vLLM converts it
    if len(frames) > _MOST_FRAMES:
        return None
    _, height, width, _ = clip.frames.shape
    resized, tokens = info._get_vision_info(  # noqa: SLF001  # as above
        image_width=width,
        image_height=height,
        num_frames=len(frames),
        image_processor=processor,
        mm_kwargs=options,
        modality="video",
    )
    vision = info.get_hf_config().vision_config
    times = -(-len(frames) // vision.temporal_patch_size)
    grid = (times, resized.height // vision.patch_size, resized.width // vision.patch_size)
    return Sized(tokens, {"video_grid_thw": torch.tensor(grid), **fields}, ProcessorOptions(frames=tuple(frames)))
