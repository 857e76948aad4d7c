"""Parts of models' layouts: forms of pixels and arrangements of rows."""

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from vitwire._inputs.layouts import images_of_layouts
from vitwire.integrations.transformers._features import Call, Features, Layout
from vitwire.items import Item

# -- any number of tiles ---------------------------------------------------------------------------


def stacked(_: Call, rows: list[Tensor]) -> Features:
    return torch.stack(rows)


def joined(_: Call, rows: list[Tensor]) -> Features:
    return torch.cat(rows)


def one_each(call: Call) -> list[int]:
    """Each tile by itself: which tiles are of one image is not known here, and no row depends on it."""
    return [1] * len(call.pixels)


def one_each_unless_listed(call: Call) -> list[int] | None:
    """Pixtral's processor gives the sizes of images, which are not tiles."""
    return None if call.arguments.get("image_sizes") is not None else one_each(call)


# -- LLaVA-NeXT, LLaVA-NeXT-Video and LLaVA-OneVision: tiles of images -----------------------------


def cut_images(call: Call) -> list[int] | None:
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


def packed(call: Call, rows: list[Tensor]) -> Features:
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


def packed_next(call: Call, rows: list[Tensor]) -> Features:
    """As the model itself packs rows of tiles: without padding, with line breaks."""
    model = call.model
    features, _ = model.pack_image_features(
        _tiles_of(call, rows),
        call.arguments["image_sizes"],
        vision_feature_select_strategy=model.config.vision_feature_select_strategy,
        image_newline=model.image_newline,
    )
    return features  # type: ignore[no-any-return]


def layouts_of_images(call: Call) -> list[tuple[int, int, int]] | None:
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


def packed_or_pooled(call: Call, rows: list[Tensor]) -> Features:
    """Rows of frames are pooled already."""
    return stacked(call, rows) if call.modality == "video" else packed_next(call, rows)


def _tiles_of(call: Call, rows: list[Tensor]) -> list[Tensor]:
    """Rows of each item by tile, `(tiles, rows, width)`."""
    vision = call.model.config.vision_config
    tokens = (vision.image_size // vision.patch_size) ** 2
    return [own.unflatten(0, (-1, tokens)) for own in rows]


# -- Unlimited-OCR and HunyuanOCR: rows between lines of tokens ------------------------------------


def with_line_breaks(call: Call, rows: list[Tensor]) -> Features:
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


@torch.no_grad()
def added_rows(model: nn.Module) -> dict[str, Tensor]:
    """The rows that the model's merger adds to every image."""
    merger: Any = model.get_submodule("vision_tower.patch_merger")
    return {
        "begin": merger.after_rms(merger.image_begin)[None],
        "line_break": merger.after_rms(merger.mlp(merger.image_newline)),
        "end": merger.after_rms(merger.image_end)[None],
    }


def framed(call: Call, rows: list[Tensor]) -> Features:
    """As the model's merger arranges rows: a break behind each line, a first and a last one."""
    added = {name: row.to(rows[0]) for name, row in call.added.items()}
    merge = call.model.config.vision_config.spatial_merge_size
    heights = [int(grid[1]) // merge for grid in call.arguments["image_grid_thw"]]
    lines = [own.unflatten(0, (height, -1)) for own, height in zip(rows, heights, strict=True)]
    return [torch.cat([added["begin"], _broken(own, added["line_break"]), added["end"]]) for own in lines]


# -- tiles of prompts, padded to one number --------------------------------------------------------


def of_prompts(real: Callable[[Call], Tensor], others: Callable[[Call], Mapping[str, Any]] = lambda _: {}) -> Layout:
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


def filled_tiles(call: Call) -> Tensor:
    """Tiles with a value other than zero; all tiles if there are none."""
    real = (call.pixels != 0).flatten(2).any(-1)
    return real if real.any() else torch.ones_like(real)


def whole_tiles(call: Call) -> Tensor:
    """As `filled_tiles`. Raises ValueError if a mask covers a part of a tile."""
    real, mask = filled_tiles(call), call.arguments.get("pixel_attention_mask")
    if mask is not None and not mask[real].all():
        raise ValueError("pixel_attention_mask covers a part of a tile, which is unsupported: resize to whole tiles")
    return real


def marked_tiles(call: Call) -> Tensor:
    marks: Tensor = call.arguments["pixel_attention_mask"]
    return marks


def path_of_docling(call: Call) -> Mapping[str, Any]:
    """Which of Granite for Docling's two paths the caller asks for."""
    return {"tile_fine_mask": call.arguments.get("tile_fine_mask")}


def routed_output(**fields: Any) -> BaseModelOutputWithPooling:  # noqa: ANN401  # fields of the output
    """With a field for the router's opinion, which generation does not need."""
    from transformers.models.granite_docling import modeling_granite_docling  # noqa: PLC0415  # of one model

    output: BaseModelOutputWithPooling = modeling_granite_docling.GraniteDoclingImageFeaturesOutput(**fields)
    return output


# -- language models that read more than rows: Ovis 2, Llama 3.2 Vision, Phi-4 multimodal ----------


def indicators(call: Call) -> Mapping[str, Tensor]:
    """Embeddings of the tokens between tiles: the last ones of the visual vocabulary."""
    count = call.model.config.vision_config.num_visual_indicator_tokens
    return {"visual_indicator_features": call.model.visual_embeddings_table.weight[-count:]}


def with_blank_tiles(outputs: Mapping[str, Any]) -> list[Item]:
    """Blank tiles have rows too, as tokens before an image attend to all rows in transformers."""
    return [Item(own.pixels, own.grid) for own in images_of_layouts(outputs, blank=True)]


def projected_states(call: Call, rows: list[Tensor]) -> BaseModelOutput:
    """Projected already, `(prompts, images, tiles, rows of a tile, width)`. Raises ValueError over padding."""
    prompts, images, tiles = call.pixels.shape[:3]
    if len(rows) != prompts * images:
        prompt, place = (call.arguments["aspect_ratio_ids"] == 0).nonzero()[0].tolist()
        field = f"aspect_ratio_ids[{prompt}][{place}]"
        raise ValueError(f"{field}: the prompts of a batch must all have the same number of images, got padding (0)")
    states = torch.stack(rows)
    return BaseModelOutput(last_hidden_state=states.view(prompts, images, tiles, -1, states.shape[-1]))


def placed_in_prompt(call: Call, rows: list[Tensor]) -> Tensor:
    """Embeddings of the prompt with the rows in place of its image tokens."""
    embeddings: Tensor = call.arguments["inputs_embeds"]
    places = call.arguments["input_ids"] == call.model.config.vision_config.image_token_id
    joined = torch.cat(rows)
    if int(places.sum()) != len(joined):
        raise ValueError(f"input_ids: {int(places.sum())} image tokens, but the images have {len(joined)} rows")
    return embeddings.masked_scatter(places[..., None], joined.to(embeddings))
