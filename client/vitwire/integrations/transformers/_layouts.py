"""How models take pixels: from the arguments of their feature methods to items, and from rows to features.

The arguments are named as in the outputs of the models' processors, so `Item.from_processor` makes the items.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from vitwire._canvases import images_of_layouts
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
        names = ("pixel_values_videos",) if self.modality == "video" else ("pixel_values", "image_pixel_values")
        pixels: Tensor = next(self.arguments[name] for name in names if name in self.arguments)
        return pixels


def _each(call: Call, rows: list[Tensor]) -> Features:
    del call
    return rows


def _given(call: Call) -> Mapping[str, Any]:
    return call.arguments


@dataclass(frozen=True, slots=True)
class Layout:
    """One way of taking pixels."""

    arguments: Callable[[Call], Mapping[str, Any]] = _given
    """What the items are made of, in the form of a processor's output."""
    tiles: Callable[[Call], list[int] | list[tuple[int, int, int]] | None] = lambda _: None
    """Numbers of tiles of each item, or its grid, where the arguments do not say them."""
    features: Callable[[Call, list[Tensor]], Features] = _each
    """From the rows of each item to what the model's own method returns as `pooler_output`."""
    deepstack_output: Callable[..., BaseModelOutputWithPooling] = BaseModelOutputWithDeepstackFeatures
    """What holds the features of several layers, which are fields of it by name."""
    added: Callable[[Any], Mapping[str, Tensor]] = lambda _: {}
    """From the model, while it has its tower, to rows of that tower that do not depend on the pixels."""
    before_projector: bool = False
    """The model projects what the method returns as `last_hidden_state`."""
    beside: Callable[[Call], Mapping[str, Tensor]] = lambda _: {}
    """Other fields of the method's output, which do not depend on the pixels."""

    replaces: str = ""
    """Path of the module whose `forward` is replaced, in models without feature methods."""
    returns: Callable[[Call, list[Tensor]], Any] = _each
    """From the rows of each item to what that `forward` returns."""
    attributes: tuple[str, ...] = ()
    """What the model reads of that module."""
    cut: Callable[[Mapping[str, Any]], list[Item]] | None = None
    """From the arguments to items, where these are not as for other clients."""

    def items(self, call: Call, described: Model) -> list[Item]:
        """Raises InvalidItem for arguments that contradict each other, and ValueError for those with a gradient."""
        dtype: torch.dtype = getattr(torch, described.dtype, torch.float32)
        outputs = {name: _sent(name, value, dtype) for name, value in self.arguments(call).items()}
        if self.cut:
            return self.cut(outputs)
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


def _one_each_unless_listed(call: Call) -> list[int] | None:
    """Pixtral's processor gives the sizes of images, which are not tiles."""
    return None if call.arguments.get("image_sizes") is not None else _one_each(call)


# -- LLaVA-NeXT and LLaVA-OneVision ----------------------------------------------------------------


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
    model, tiles = call.model, _tiles_of(call, rows)
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


def _packed_next(call: Call, rows: list[Tensor]) -> Features:
    """As the model itself packs rows of tiles: without padding, with line breaks."""
    model = call.model
    features, _ = model.pack_image_features(
        _tiles_of(call, rows),
        call.arguments["image_sizes"],
        vision_feature_select_strategy=model.config.vision_feature_select_strategy,
        image_newline=model.image_newline,
    )
    return features  # type: ignore[no-any-return]


def _layouts_of_images(call: Call) -> list[tuple[int, int, int]] | None:
    """Grids of images, whose rows are not those of a clip with as many frames."""
    from transformers.models.llava_next_video import modeling_llava_next_video  # noqa: PLC0415  # of one model

    if call.modality == "video":
        return None
    config, layout = call.model.config, cast("Any", modeling_llava_next_video).get_anyres_image_grid_shape
    found = [
        layout(size, config.image_grid_pinpoints, config.vision_config.image_size)
        for size in call.arguments["image_sizes"]
    ]
    return [(1 + rows * columns, rows, columns) for rows, columns in found]


def _packed_or_pooled(call: Call, rows: list[Tensor]) -> Features:
    """Rows of frames are pooled already."""
    return _stacked(call, rows) if call.modality == "video" else _packed_next(call, rows)


def _tiles_of(call: Call, rows: list[Tensor]) -> list[Tensor]:
    """Rows of each item by tile, `(tiles, rows, width)`."""
    vision = call.model.config.vision_config
    tokens = (vision.image_size // vision.patch_size) ** 2
    return [own.unflatten(0, (-1, tokens)) for own in rows]


# -- tiles of prompts, padded to one number -----------------------------------------------------------


def _of_prompts(real: Callable[[Call], Tensor], others: Callable[[Call], Mapping[str, Any]] = lambda _: {}) -> Layout:
    """Models that take tiles `(prompts, tiles, 3, H, W)` and return the rows of each prompt, which may have none.

    real: which tiles `(prompts, tiles)` are not padding. others: arguments that are checked too.
    """

    def features(call: Call, rows: list[Tensor]) -> Features:
        return [own.flatten(0, 1) for own in torch.stack(rows).split(real(call).sum(1).tolist())]

    return Layout(
        arguments=lambda call: {"pixel_values": call.pixels[real(call)], **others(call)},
        tiles=lambda call: [1] * int(real(call).sum()),
        features=features,
    )


def _filled(call: Call) -> Tensor:
    """Those that are not zeros; all if all are."""
    real = (call.pixels != 0).flatten(2).any(-1)
    return real if real.any() else torch.ones_like(real)


def _whole(call: Call) -> Tensor:
    """The same. Raises ValueError where a mask covers a part of a tile."""
    real, mask = _filled(call), call.arguments.get("pixel_attention_mask")
    if mask is not None and not mask[real].all():
        raise ValueError("pixel_attention_mask covers a part of a tile, which is not served: resize to whole tiles")
    return real


def _marked(call: Call) -> Tensor:
    marks: Tensor = call.arguments["pixel_attention_mask"]
    return marks


def _path(call: Call) -> Mapping[str, Any]:
    """Of Granite for Docling's two paths, the one that the caller asks for."""
    return {"tile_fine_mask": call.arguments.get("tile_fine_mask")}


def _routed(**fields: Any) -> BaseModelOutputWithPooling:  # noqa: ANN401  # fields of the output
    """With a field for the router's opinion, which generation does not need."""
    from transformers.models.granite_docling import modeling_granite_docling  # noqa: PLC0415  # of one model

    output: BaseModelOutputWithPooling = modeling_granite_docling.GraniteDoclingImageFeaturesOutput(**fields)
    return output


# -- Ovis 2 ----------------------------------------------------------------------------------------


def _indicators(call: Call) -> Mapping[str, Tensor]:
    """Embeddings of the tokens between tiles: the last ones of the visual vocabulary."""
    count = call.model.config.vision_config.num_visual_indicator_tokens
    return {"visual_indicator_features": call.model.visual_embeddings_table.weight[-count:]}


# -- Llama 3.2 Vision ------------------------------------------------------------------------------


def _with_blank_tiles(outputs: Mapping[str, Any]) -> list[Item]:
    """Blank tiles have rows too, as tokens before an image attend to all rows in transformers."""
    return [Item(own.pixels, own.grid) for own in images_of_layouts(outputs, blank=True)]


def _states(call: Call, rows: list[Tensor]) -> Any:  # noqa: ANN401  # an output of transformers
    """Projected already, `(prompts, images, tiles, rows of a tile, width)`. Raises ValueError over padding."""
    prompts, images, tiles = call.pixels.shape[:3]
    if len(rows) != prompts * images:
        raise ValueError("aspect_ratio_ids: the prompts of a batch must have as many images each, got padding (0)")
    states = torch.stack(rows)
    return BaseModelOutput(last_hidden_state=states.view(prompts, images, tiles, -1, states.shape[-1]))


# -- Phi-4 -----------------------------------------------------------------------------------------


def _placed(call: Call, rows: list[Tensor]) -> Tensor:
    """Embeddings of the prompt with the rows in place of its image tokens."""
    embeddings: Tensor = call.arguments["inputs_embeds"]
    places = call.arguments["input_ids"] == call.model.config.vision_config.image_token_id
    joined = torch.cat(rows)
    if int(places.sum()) != len(joined):
        raise ValueError(f"input_ids: {int(places.sum())} image tokens, but the images have {len(joined)} rows")
    return embeddings.masked_scatter(places[..., None], joined.to(embeddings))


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
_TILES = Layout(tiles=_one_each, features=_stacked)
_PADDED_TILES = _of_prompts(_whole)
_PADDED_IMAGES = Layout(features=_of_prompts(_filled).features)
"""Images of any size, whose patches the client cuts."""

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
    "llava_next_video": Layout(tiles=_layouts_of_images, features=_packed_or_pooled),
    "llava_next": Layout(tiles=_cut_images, features=_packed_next),
    "llava_onevision": Layout(tiles=_cut_images, features=_packed),
    "qianfan_ocr": _TILES,
    "aya_vision": _TILES,
    "cohere2_vision": _TILES,
    "got_ocr2": _TILES,
    "janus": _TILES,
    "gemma4": _LISTED,
    "diffusion_gemma": Layout(features=_joined),
    "gemma3": _TILES,
    "paligemma": _TILES,
    "vipllava": _TILES,
    "deepseek_vl": _TILES,
    "deepseek_vl_hybrid": Layout(features=_stacked),
    "deepseek_ocr2": _LISTED,
    "unlimited_ocr": Layout(features=_with_line_breaks),
    "hunyuan_vl": Layout(features=_framed, added=_added_rows),
    "aria": Layout(features=_stacked),
    "mllama": Layout(replaces="vision_model", returns=_states, attributes=("num_patches",), cut=_with_blank_tiles),
    "phi4_multimodal": Layout(replaces="embed_tokens_extend.image_embed", returns=_placed),
    "florence2": _TILES,
    "llama4": Layout(tiles=_one_each, features=_stacked, before_projector=True),
    "ovis2": Layout(tiles=_one_each, features=_stacked, beside=_indicators),
    "step3p7": _LISTED,
    "llava": Layout(tiles=_one_each_unless_listed),
    "mistral3": _LISTED,
    "idefics3": _PADDED_TILES,
    "smolvlm": _PADDED_TILES,
    "idefics2": _PADDED_IMAGES,
    "lfm2_vl": _LISTED,
    "mistral_large4": _LISTED,
    "lighton_ocr": _LISTED,
    "minicpmv4_6": _LISTED,
    "minicpmv4_7": _LISTED,
    "minicpm_ocr": _LISTED,
    "nemotron_h_omni": _LISTED,
    "muse_glimmer": _LISTED,
    "muse_spark": _LISTED,
    "granite_docling": replace(_of_prompts(_marked, _path), deepstack_output=_routed),
    "video_llama_3": _LISTED,
}
"""By the `model_type` of the module that has the methods."""

_SAME = {
    "qwen2_5_omni": "qwen2_5_omni_thinker",
    "qwen3_omni_moe": "qwen3_omni_moe_thinker",
    "internvl_chat": "internvl",
    "vlm": "hyperclovax_vision_v2",
    "ovis": "ovis2",
    "phi4mm": "phi4_multimodal",
    "videollama3_qwen2": "video_llama_3",
    "step3_vl": "step3p7",
    "step_robotics": "step3p7",
}
"""Checkpoints of another layout, or with more parts, of the same tower."""


def tower_type(model_type: str) -> str:
    """The name in `LAYOUTS`, if it is there, of a model or of the service that has its tower."""
    return _SAME.get(model_type, model_type)
