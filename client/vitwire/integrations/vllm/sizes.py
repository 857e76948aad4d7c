"""What a model's prompt needs to know of an image, from its size alone, by vLLM's own rules."""

from collections.abc import Mapping
from inspect import signature
from typing import NamedTuple

import torch
from vllm.multimodal.processing import BaseProcessingInfo

from vitwire.integrations.vllm.parts import WITH_GRIDS, WITHOUT_GRIDS

MODELS = frozenset({*WITH_GRIDS, *WITHOUT_GRIDS})
"""Model types whose images the front end gives to the encoder."""
_SIZES = frozenset({"min_pixels", "max_pixels", "size"})
"""Options of processors that set the size of an image."""
_ON_DEVICE = frozenset({"do_normalize", "do_rescale"})
"""vLLM sets these itself when its tower normalises on the device."""
_OTHERS = frozenset({"fps", "num_frames", "do_sample_frames", "videos_kwargs", "audio_kwargs"})
"""Options that do not concern images."""


class Sized(NamedTuple):
    """An image in a prompt."""

    tokens: int
    """Places of its embedding."""
    fields: Mapping[str, torch.Tensor]
    """The processor's outputs without pixels: int64 tensors."""


def may_encode(info: BaseProcessingInfo, options: Mapping[str, object]) -> bool:
    """Whether the processor's options, of server and request, at most change the size of images.

    The encoder has no other options, and an image whose size it computes differently is declined later.
    """
    merged = info._merge_and_resolve_mm_processor_kwargs(options)  # noqa: SLF001  # as vLLM's own size rule
    merged = {name: value for name, value in merged.items() if value not in (None, {})}
    images = merged.pop("images_kwargs", {})
    own = _ON_DEVICE if info.ctx.get_mm_config().mm_device_do_normalize else frozenset()
    return merged.keys() <= _SIZES | _OTHERS | own and images.keys() <= _SIZES | own


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
    return Sized(tokens, {"image_grid_thw": torch.tensor(grid)})
