"""Prompts with random pixels in the shapes that each model's own processor emits."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

Grid = tuple[int, int, int]
Inputs = dict[str, Any]
_IMAGES: list[Grid] = [(1, 8, 12), (1, 4, 4), (1, 6, 4)]
_CLIP: Grid = (2, 8, 8)
_PER_FRAME = ("qwen3_vl", "qwen3_5", "qwen4", "cosmos3", "cohere_compass", "glm")
"""Beginnings of the types of models whose prompts mark each frame of a clip."""
_SQUARE = ("kimi_k25", "paddleocr_vl")
"""Their processors emit patches as `(C, p, p)`."""
_STRIPS = ("minicpmv4_6", "minicpmv4_7", "minicpm_ocr")
"""Their processors emit the patches of all images as one strip."""
_SINGLE = (*_SQUARE, "ernie4_5_vl_moe", "video_llama_3")
"""Their patches are of one frame."""


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@dataclass(frozen=True, slots=True)
class Pictures:
    """Images or one clip, as arguments of a model."""

    arguments: Inputs
    modality: str = "image"

    def counts(self, owner: Any) -> list[int]:
        """Rows of each image, tile or clip, from the model itself."""
        method = getattr(owner, f"get_{self.modality}_features")
        taken = inspect.signature(method).parameters
        output = method(**{name: value for name, value in self.arguments.items() if name in taken})
        return [len(rows) for rows in (output.pooler_output if output.pooler_output is not None else output[0])]


# -- pixels ----------------------------------------------------------------------------------------


def _patches(config: Any, grids: Sequence[Grid], modality: str) -> Pictures:
    vision = config.vision_config
    temporal = 1 if config.model_type in _SINGLE else _frames_of_a_patch(vision)
    rows = _random(sum(prod(grid) for grid in grids), 3 * temporal * vision.patch_size**2)
    if config.model_type in _SQUARE:
        rows = rows.view(len(rows), 3, vision.patch_size, vision.patch_size)
    suffix = "_videos" if modality == "video" else ""
    arguments = {f"pixel_values{suffix}": rows, f"{modality}_grid_thw": torch.tensor(grids)}
    if modality == "image":
        arguments["image_merge_sizes"] = torch.ones(len(grids), dtype=torch.int64)  # of VideoLLaMA 3
    if modality == "video":
        arguments["video_merge_sizes"] = torch.full((len(grids),), 2)  # of VideoLLaMA 3
        arguments["video_second_per_grid"] = torch.tensor([1.0])  # of omni models
    return Pictures(arguments, modality)


def _frames_of_a_patch(vision: Any) -> int:
    names = ("patch_temporal", "temporal_patch_size")
    return next((int(n) for n in (getattr(vision, name, None) for name in names) if n), 1)


def _padded_images(config: Any) -> Pictures:
    side = config.vision_config.patch_size
    sizes = [(h * side, w * side) for _, h, w in _IMAGES]
    pixels = torch.zeros(len(sizes), 3, max(h for h, _ in sizes), max(w for _, w in sizes))
    for image, (h, w) in zip(pixels, sizes, strict=True):
        image[:, :h, :w] = _random(3, h, w)
    return Pictures({"pixel_values": pixels, "image_sizes": torch.tensor(sizes)})


def _positioned(config: Any, grids: Sequence[Grid], modality: str) -> Pictures:
    frames = [(h, w) for t, h, w in grids for _ in range(t)]
    most = max(h * w for h, w in frames) + 9
    pixels = torch.zeros(len(frames), most, 3 * config.vision_config.patch_size**2)
    places = torch.full((len(frames), most, 2), -1)
    for number, (h, w) in enumerate(frames):
        pixels[number, : h * w] = _random(h * w + number, pixels.shape[-1])[number:].sigmoid()
        places[number, : h * w] = torch.cartesian_prod(torch.arange(h), torch.arange(w)).flip(1)
    if modality == "image":
        return Pictures({"pixel_values": pixels, "image_position_ids": places})
    counts = torch.tensor([t for t, _, _ in grids])
    arguments = {"pixel_values_videos": pixels, "video_position_ids": places, "num_frames_per_video": counts}
    return Pictures(arguments, "video")


def _naflex(config: Any) -> Pictures:
    """Rows of patches `(images, patches, C*p*p)`, padded, with the shapes of the images."""
    sizes = [(h, w) for _, h, w in _IMAGES]
    pixels = torch.zeros(len(sizes), max(h * w for h, w in sizes) + 5, 3 * config.vision_config.patch_size**2)
    mask = torch.zeros(pixels.shape[:2], dtype=torch.int32)
    for number, (h, w) in enumerate(sizes):
        pixels[number, : h * w] = _random(h * w, pixels.shape[-1])
        mask[number, : h * w] = 1
    return Pictures({"pixel_values": pixels, "spatial_shapes": torch.tensor(sizes), "pixel_attention_mask": mask})


def _sized(config: Any) -> Pictures:
    patches = _patches(config, _IMAGES, "image").arguments
    return Pictures({"pixel_values": patches["pixel_values"], "image_grid_hw": patches["image_grid_thw"][:, 1:]})


def _strip(config: Any, sizes: Sequence[tuple[int, int]], modality: str) -> Pictures:
    side = config.vision_config.patch_size
    pixels = _random(1, 3, side, side * sum(map(prod, sizes)))
    suffix = "_videos" if modality == "video" else ""
    return Pictures({f"pixel_values{suffix}": pixels, f"target_sizes{suffix}": torch.tensor(sizes)}, modality)


def _side(config: Any) -> int:
    size = config.vision_config.image_size
    return int(size if isinstance(size, int) else size[0])


def _tiles(config: Any) -> Pictures:
    return Pictures({"pixel_values": _random(3, 3, _side(config), _side(config))})


def _margins(config: Any) -> Pictures:
    side = _side(config)
    masks = torch.zeros(3, side, side, dtype=torch.bool)
    for mask, (height, width) in zip(masks, ((side, side), (side, 61), (44, side)), strict=True):
        mask[:height, :width] = True
    return Pictures({**_tiles(config).arguments, "pixel_mask": masks})


def _pairs(config: Any) -> Pictures:
    large = config.high_res_vision_config.image_size
    return Pictures({**_tiles(config).arguments, "high_res_pixel_values": _random(3, 3, large, large)})


def _views(side: int, crop: int) -> Pictures:
    return Pictures(
        {
            "pixel_values": _random(3, 3, side, side),
            "pixel_values_local": _random(5, 3, crop, crop),
            "num_local_patches": torch.tensor([2, 0, 3]),
        }
    )


def _cut_images(config: Any) -> Pictures:
    """Three prompts of one image each, cut in 3, 2 and 5 tiles, the whole image among them, padded to 5."""
    side = _side(config)
    sizes = [[side, 2 * side], [side - 6, side], [2 * side, 2 * side - 9]]
    pixels = _random(3, 5, 3, side, side)
    for tiles, count in zip(pixels, (3, 2, 5), strict=True):
        tiles[count:] = 0
    return Pictures(
        {
            "pixel_values": pixels,
            "image_sizes": torch.tensor(sizes),
            "batch_num_images": torch.tensor([1, 1, 1]),
        }
    )


def _tiles_of_prompts(config: Any) -> Pictures:
    """As many tiles of each of three prompts: zeros would be padding."""
    return Pictures({"pixel_values": _random(3, 2, 3, _side(config), _side(config))})


def _images_of_prompts(config: Any) -> Pictures:
    """Two images of each of three prompts, padded; the mask marks the pixels that are not padding."""
    sizes = [(60, 84), (84, 57), (70, 70), (56, 84), (84, 84), (83, 56)]
    pixels, mask = torch.zeros(6, 3, 84, 84), torch.zeros(6, 84, 84, dtype=torch.int64)
    for number, (height, width) in enumerate(sizes):
        pixels[number, :, :height, :width] = _random(3, height, width)
        mask[number, :height, :width] = 1
    return Pictures({"pixel_values": pixels.unflatten(0, (3, 2)), "pixel_attention_mask": mask.unflatten(0, (3, 2))})


def _marked_tiles(config: Any) -> Pictures:
    """Tiles of three prompts, and which of them are not padding."""
    pixels = _random(3, 5, 3, _side(config), _side(config))
    return Pictures({"pixel_values": pixels, "pixel_attention_mask": torch.arange(5) < torch.tensor([[3], [1], [5]])})


def _frames(config: Any) -> Pictures:
    return Pictures({"pixel_values_videos": _random(1, 3, 3, _side(config), _side(config))}, "video")


def _always_cut_images(config: Any) -> Pictures:
    """Three images, cut in 3, 3 and 5 tiles, the whole image among them, padded to 5."""
    side = _side(config)
    pixels = _random(3, 5, 3, side, side)
    pixels[:2, 3:] = 0
    sizes = [[side, 2 * side], [2 * side - 6, side], [2 * side, 2 * side - 9]]
    return Pictures({"pixel_values": pixels, "image_sizes": torch.tensor(sizes)})


_IMAGE: Mapping[str, Callable[[Any], Pictures]] = {
    "llava": lambda config: (_padded_images if config.vision_config.model_type == "pixtral" else _tiles)(config),
    **dict.fromkeys(("mistral3", "mistral_large4", "lighton_ocr"), _padded_images),
    "nemotron_h_omni": _sized,
    **dict.fromkeys(_STRIPS, lambda config: _strip(config, [(8, 12), (4, 4), (8, 4)], "image")),
    **dict.fromkeys(
        ("gemma4", "diffusion_gemma"), lambda config: _positioned(config, [(1, 6, 9), (1, 3, 6), (1, 6, 3)], "image")
    ),
    **dict.fromkeys(("internvl", "paligemma", "vipllava", "qianfan_ocr", "got_ocr2", "janus", "aya_vision"), _tiles),
    **dict.fromkeys(("cohere2_vision", "gemma3", "t5gemma2_encoder", "llama4", "ovis2", "deepseek_vl"), _tiles),
    "florence2": lambda _: Pictures({"pixel_values": _random(3, 3, 96, 96)}),
    "aria": _margins,
    "deepseek_vl_hybrid": _pairs,
    "deepseek_ocr2": lambda _: _views(128, 96),
    "unlimited_ocr": lambda _: Pictures(
        {**_views(128, 96).arguments, "num_local_patches": [2, 0, 3], "patches_grid": [[2, 1], [1, 1], [1, 3]]}
    ),
    "step3p7": lambda _: _views(168, 112),
    **dict.fromkeys(("llava_next", "llava_next_video"), _always_cut_images),
    "llava_onevision": _cut_images,
    "lfm2_vl": _naflex,
    "granite_docling": _marked_tiles,
    "idefics2": _images_of_prompts,
    **dict.fromkeys(("idefics3", "smolvlm"), _tiles_of_prompts),
}
_VIDEO: Mapping[str, Callable[[Any], Pictures]] = {
    **dict.fromkeys(_STRIPS, lambda config: _strip(config, [(8, 8), (8, 8)], "video")),
    "gemma4": lambda config: _positioned(config, [(2, 3, 6)], "video"),
    "llava_onevision": _frames,
    "llava_next_video": _frames,
}


def images(config: Any) -> Pictures:
    """Three images of different sizes, where the model takes such."""
    own = _IMAGE.get(config.model_type)
    return own(config) if own else _patches(config, _IMAGES, "image")


def clip(config: Any) -> Pictures:
    """A clip."""
    own = _VIDEO.get(config.model_type)
    return own(config) if own else _patches(config, [_CLIP], "video")


# -- prompts ---------------------------------------------------------------------------------------


TOKENS = ("input_ids", "attention_mask", "mm_token_type_ids")
"""Inputs with a value for each token of a prompt."""


def prompt(config: Any, pictures: Pictures, counts: Sequence[Sequence[int]]) -> Inputs:
    """Token ids with a placeholder per row, for prompts with so many rows for each of their items, padded left."""
    # GLM has the placeholders of images in clips too.
    video = pictures.modality == "video"
    placeholder = config.video_token_id if video and not config.model_type.startswith("glm") else config.image_token_id
    frames = _CLIP[0] if video and config.model_type.startswith(_PER_FRAME) else 1
    marks = (504, 505) if video and config.model_type == "glm5_next" else (502, 503)
    rows = [_ids(placeholder, marks, [count // frames for count in own for _ in range(frames)]) for own in counts]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(own)) + own for own in rows])
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "mm_token_type_ids": (2 if video else 1) * (ids == placeholder).long(),
        **pictures.arguments,
    }


def _ids(placeholder: int, marks: tuple[int, int], counts: Sequence[int]) -> list[int]:
    start, end = marks
    return [5, 6, *(token for count in counts for token in (start, *[placeholder] * count, end)), 7, 8]
