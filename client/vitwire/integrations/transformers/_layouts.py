"""How models take pixels: from the arguments of their feature methods to items, and from rows to features.

The arguments are named as in the outputs of the models' processors, so `Item.from_processor` makes the items.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitwire._items import Item, Modality
from vitwire._model import Model

Features = Tensor | Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of `get_image_features` or `get_video_features`."""

    model: Any
    """The module whose method is called, a PreTrainedModel."""
    modality: Modality
    arguments: Mapping[str, Any]
    """By the names in the method's signature."""
    added: Mapping[str, Tensor] = field(default_factory=dict)
    """Rows that do not depend on the pixels, and that the service does not send."""

    @property
    def pixels(self) -> Tensor:
        """The main argument."""
        pixels: Tensor = self.arguments["pixel_values_videos" if self.modality == "video" else "pixel_values"]
        return pixels


def _each(call: Call, rows: list[Tensor]) -> Features:
    del call
    return rows


@dataclass(frozen=True, slots=True)
class Layout:
    """One way of taking pixels."""

    tiles: Callable[[Call], list[int] | None] = lambda _: None
    """Numbers of tiles of each item, where the arguments do not say them."""
    features: Callable[[Call, list[Tensor]], Features] = _each
    """From the rows of each item to what the model's own method returns as `pooler_output`."""
    added: Callable[[Any], Mapping[str, Tensor]] = lambda _: {}
    """From the model, while it has its tower, to rows of that tower that do not depend on the pixels."""
    before_projector: bool = False
    """The model projects what the method returns as `last_hidden_state`."""

    def items(self, call: Call, described: Model) -> list[Item]:
        """Raises InvalidItem for arguments that contradict each other, and ValueError for those with a gradient."""
        dtype: torch.dtype = getattr(torch, described.dtype, torch.float32)
        outputs = {name: _sent(name, value, dtype) for name, value in call.arguments.items()}
        return Item.from_processor(outputs, described, grid_thw=self.tiles(call))


def _sent(name: str, value: Any, dtype: torch.dtype) -> Any:  # noqa: ANN401  # any argument
    """Pixels in the dtype that the service converts them to, if it is narrower; other arguments as they are."""
    if not isinstance(value, Tensor) or "pixel_values" not in name:
        return value
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires a gradient, which a remote vision tower cannot compute; detach it first")
    return value.to(dtype) if value.dtype == torch.float32 else value


def _stacked(call: Call, rows: list[Tensor]) -> Features:
    del call
    return torch.stack(rows)


def _joined(call: Call, rows: list[Tensor]) -> Features:
    del call
    return torch.cat(rows)


def _one_each(call: Call) -> list[int]:
    """Each tile by itself: which tiles are of one image is not known here, and no row depends on it."""
    return [1] * len(call.pixels)


# -- LLaVA-OneVision -------------------------------------------------------------------------------


def _cut_images(call: Call) -> list[int] | None:
    """Tiles of each image; images that share a prompt with others are not cut."""
    from transformers.models.llava_onevision import modeling_llava_onevision  # noqa: PLC0415  # of one model

    sizes = call.arguments.get("image_sizes")
    if call.modality == "video" or sizes is None:
        return None
    config, images = call.model.config, call.arguments.get("batch_num_images")
    alone = [True] * len(sizes) if images is None else [int(n) == 1 for n in images for _ in range(int(n))]
    count = modeling_llava_onevision.image_size_to_num_patches
    return [
        count(size, config.image_grid_pinpoints, config.vision_config.image_size) if cut else 1
        for size, cut in zip(sizes, alone, strict=True)
    ]


def _packed(call: Call, rows: list[Tensor]) -> Features:
    """As the model itself packs rows of tiles: without padding, with line breaks; frames pooled."""
    model, vision = call.model, call.model.config.vision_config
    tokens = (vision.image_size // vision.patch_size) ** 2
    tiles = [own.unflatten(0, (-1, tokens)) for own in rows]
    if call.modality == "video":
        line_break = model.image_newline[None].to(rows[0].device)
        return torch.stack([torch.cat([model.apply_pooling(clip).flatten(0, 1), line_break]) for clip in tiles])
    features, _ = model.pack_image_features(
        tiles,
        call.arguments["image_sizes"],
        image_newline=model.image_newline,
        vision_aspect_ratio=call.arguments.get("vision_aspect_ratio") or model.config.vision_aspect_ratio,
    )
    return features  # type: ignore[no-any-return]


# -- Unlimited-OCR ---------------------------------------------------------------------------------


def _with_line_breaks(call: Call, rows: list[Tensor]) -> Features:
    """As the model itself packs rows: the crops as one picture, then the overview, a break behind each line."""
    model, sam = call.model, call.model.config.vision_config.sam_config
    line_break = model.image_newline.to(rows[0].device)
    whole = sam.image_size // sam.patch_size // 4
    counts, grids = call.arguments.get("num_local_patches"), call.arguments.get("patches_grid")
    features = []
    for at, own in enumerate(rows):
        crops, overview, separator = own[: -(whole**2 + 1)], own[-(whole**2 + 1) : -1], own[-1:]
        lines = [_broken(overview.unflatten(0, (whole, whole)), line_break), separator]
        if len(crops) and counts is not None and grids is not None:
            columns, height = (int(side) for side in grids[at])
            side = math.isqrt(len(crops) // int(counts[at]))
            picture = crops.view(height, columns, side, side, -1).transpose(1, 2).flatten(2, 3).flatten(0, 1)
            lines.insert(0, _broken(picture, line_break))
        features.append(torch.cat(lines))
    return features


def _broken(lines: Tensor, line_break: Tensor) -> Tensor:
    """Rows of lines `(lines, rows, width)`, one after the other, each with a break behind it."""
    return torch.cat([lines, line_break.expand(len(lines), 1, -1)], dim=1).flatten(0, 1)


# -- Hunyuan-VL ------------------------------------------------------------------------------------


@torch.no_grad()
def _added_rows(model: Any) -> dict[str, Tensor]:  # noqa: ANN401  # a module
    """The rows that the model's merger adds to every image."""
    merger = model.vision_tower.patch_merger
    return {
        "begin": merger.after_rms(merger.image_begin)[None],
        "line_break": merger.after_rms(merger.mlp(merger.image_newline)),
        "end": merger.after_rms(merger.image_end)[None],
    }


def _framed(call: Call, rows: list[Tensor]) -> Features:
    """As the model's merger arranges rows: a break behind each line, a first and a last one."""
    added = {name: row.to(rows[0]) for name, row in call.added.items()}
    merge = call.model.config.vision_config.spatial_merge_size
    heights = [int(grid[1]) // merge for grid in call.arguments["image_grid_thw"]]
    lines = [own.unflatten(0, (height, -1)) for own, height in zip(rows, heights, strict=True)]
    return [torch.cat([added["begin"], _broken(own, added["line_break"]), added["end"]]) for own in lines]


# -- models ----------------------------------------------------------------------------------------

_LISTED = Layout()
"""The arguments say the size of each item."""
_TILES = Layout(_one_each, _stacked)

LAYOUTS: Mapping[str, Layout] = {
    "qwen2_vl": _LISTED,
    "qwen2_5_vl": _LISTED,
    "qwen3_vl": _LISTED,
    "qwen3_vl_moe": _LISTED,
    "qwen3_5": _LISTED,
    "qwen3_5_moe": _LISTED,
    "qwen4_exp": _LISTED,
    "cosmos3_omni": _LISTED,
    "cosmos3_edge": _LISTED,
    "cohere_compass": _LISTED,
    "lfm3_vl": _LISTED,
    "hyperclovax_vision_v2": _LISTED,
    "qwen2_5_omni_thinker": _LISTED,
    "qwen3_omni_moe_thinker": _LISTED,
    "glm4v": _LISTED,
    "glm46v": _LISTED,
    "glm4v_moe": _LISTED,
    "glm_ocr": _LISTED,
    "glmga": _LISTED,
    "glm5_next": _LISTED,
    "kimi_k25": _LISTED,
    "paddleocr_vl": _LISTED,
    "minimax_m3_vl": _LISTED,
    "ernie4_5_vl_moe": _LISTED,
    "internvl": _TILES,
    "qianfan_ocr": _TILES,
    "llava_onevision": Layout(_cut_images, _packed),
    "gemma4": _LISTED,
    "diffusion_gemma": Layout(features=_joined),
    "gemma3": _TILES,
    "deepseek_vl": _TILES,
    "deepseek_vl_hybrid": Layout(features=_stacked),
    "deepseek_ocr2": _LISTED,
    "unlimited_ocr": Layout(features=_with_line_breaks),
    "hunyuan_vl": Layout(features=_framed, added=_added_rows),
    "llama4": Layout(_one_each, _stacked, before_projector=True),
    "step3p7": _LISTED,
    "llava": _LISTED,
    "mistral3": _LISTED,
    "mistral_large4": _LISTED,
    "lighton_ocr": _LISTED,
    "minicpmv4_6": _LISTED,
    "minicpmv4_7": _LISTED,
    "minicpm_ocr": _LISTED,
    "nemotron_h_omni": _LISTED,
    "muse_glimmer": _LISTED,
    "muse_spark": _LISTED,
}
"""By the `model_type` of the module that has the methods."""

_SAME = {
    "qwen2_5_omni": "qwen2_5_omni_thinker",
    "qwen3_omni_moe": "qwen3_omni_moe_thinker",
    "internvl_chat": "internvl",
    "vlm": "hyperclovax_vision_v2",
    "step3_vl": "step3p7",
    "step_robotics": "step3p7",
}
"""Checkpoints of another layout, or with more parts, of the same tower."""


def tower_type(model_type: str) -> str:
    """The name in `LAYOUTS`, if it is there, of a model or of the service that has its tower."""
    return _SAME.get(model_type, model_type)
