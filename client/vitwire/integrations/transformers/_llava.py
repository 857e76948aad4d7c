"""LLaVA-NeXT, LLaVA-NeXT-Video and LLaVA-OneVision: tiles of images, and rows packed as the models do."""

from typing import Any, cast

import torch
from torch import Tensor

from vitwire.integrations.transformers._layout import Call, Features, stacked


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
