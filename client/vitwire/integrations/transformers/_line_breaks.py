"""Rows that the models add between lines of tokens: Unlimited-OCR and HunyuanOCR."""

import math
from typing import Any

import torch
from torch import Tensor

from vitwire.integrations.transformers._layout import Call, Features


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
def added_rows(model: Any) -> dict[str, Tensor]:  # noqa: ANN401  # a module
    """The rows that the model's merger adds to every image."""
    merger = model.vision_tower.patch_merger
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
