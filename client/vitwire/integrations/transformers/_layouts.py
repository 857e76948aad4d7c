"""How models take pixels: from the arguments of their feature methods to items, and from rows to features.

Tensors have the shapes that the models' own processors emit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from vitwire._items import Item, Modality

Features = Tensor | Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of `get_image_features` or `get_video_features`."""

    model: Any
    """The module whose method is called, a PreTrainedModel."""
    modality: Modality
    arguments: Mapping[str, Any]
    """By the names in the method's signature."""
    dtype: torch.dtype
    """What the service computes in."""

    def required(self, name: str) -> Any:  # noqa: ANN401  # a tensor, or a list of numbers
        """Raises ValueError if the argument is missing."""
        value = self.arguments.get(name)
        if value is None:
            raise ValueError(
                f"{name} is missing: {type(self.model).__name__} needs it with pixels of a {self.modality}"
            )
        return value

    def pictures(self, name: str) -> Tensor:
        """An argument that has pixels, narrowed to what the service computes in, as it would be there.

        Raises ValueError if it is missing or needs a gradient.
        """
        pixels: Tensor = self.required(name)
        if pixels.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, which a remote vision tower cannot compute; detach it first")
        return pixels.to(self.dtype) if pixels.dtype == torch.float32 else pixels

    @property
    def pixels(self) -> Tensor:
        """The main argument."""
        return self.pictures("pixel_values_videos" if self.modality == "video" else "pixel_values")


@dataclass(frozen=True, slots=True)
class Layout:
    """One way of taking pixels."""

    items: Callable[[Call], list[Item]]
    """Raises ValueError for arguments that contradict each other."""
    features: Callable[[Call, list[Tensor]], Features] = lambda _, rows: rows
    """From the rows of each item to what the model's own method returns as `pooler_output`."""
    before_projector: bool = False
    """The model projects what the method returns as `last_hidden_state`."""


def _parts(tensor: Tensor, counts: Sequence[int], what: str) -> Iterator[Tensor]:
    """Consecutive parts of so many rows. Raises ValueError unless they are all the rows."""
    if sum(counts) != len(tensor):
        raise ValueError(f"{what} has {len(tensor)} rows, the other arguments ask for {sum(counts)}")
    return (tensor[start:end] for start, end in pairwise(accumulate(counts, initial=0)))


def _stacked(call: Call, rows: list[Tensor]) -> Features:
    del call
    return torch.stack(rows)


# -- patches ---------------------------------------------------------------------------------------


def _patches(call: Call) -> list[Item]:
    """Patches of all items one after the other, and a grid for each item."""
    grids = [(t, h, w) for t, h, w in call.required(f"{call.modality}_grid_thw").tolist()]
    parts = _parts(call.pixels.flatten(1), [t * h * w for t, h, w in grids], "pixel_values")
    return [Item(part, grid, call.modality) for part, grid in zip(parts, grids, strict=True)]


def _whole_images(call: Call) -> list[Item]:
    """Images `(3, H, W)`, padded to one size, cut into patches `(3, p, p)` line by line."""
    side: int = call.model.config.vision_config.patch_size
    sizes = torch.as_tensor(call.required("image_sizes")).tolist()
    pixels = call.pixels
    if len(sizes) != len(pixels):
        raise ValueError(f"pixel_values has {len(pixels)} images, image_sizes has {len(sizes)}")
    items = []
    for image, (height, width) in zip(pixels, sizes, strict=True):
        h, w = height // side, width // side
        cut = image[:, : h * side, : w * side].unflatten(2, (w, side)).unflatten(1, (h, side))
        items.append(Item(cut.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1), (1, h, w)))
    return items


def _positioned(call: Call) -> list[Item]:
    """Patches of each picture, padded to one number, with their columns and rows; -1 marks padding."""
    places: Tensor = call.required(f"{call.modality}_position_ids")
    frames = [_picture(*each) for each in zip(call.pixels, places, strict=True)]
    if call.modality == "image":
        return [Item(patches, (1, h, w)) for patches, (h, w) in frames]
    items = []
    for start, end in pairwise(accumulate(call.required("num_frames_per_video").tolist(), initial=0)):
        pictures, sizes = zip(*frames[start:end], strict=True)
        if len(set(sizes)) > 1:
            raise ValueError(f"the frames of a video differ in size: {sorted(set(sizes))}")
        items.append(Item(torch.cat(pictures), (len(pictures), *sizes[0]), "video"))
    return items


def _picture(patches: Tensor, places: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """The patches of one picture without padding, and its rows and columns."""
    real = (places != -1).all(-1)
    patches, places = patches[real], places[real]
    w, h = (places.max(0).values + 1).tolist()
    numbers = places[:, 1] * w + places[:, 0]
    if not torch.equal(numbers, torch.arange(h * w, device=numbers.device)):
        raise ValueError("the positions of a picture's patches are not those of a full grid, line by line")
    return patches, (h, w)


# -- tiles -----------------------------------------------------------------------------------------


def _tiles(call: Call) -> list[Item]:
    """Tiles of all images one after the other; which image has which is not known here."""
    return [Item(tile.unsqueeze(0), (1, 1, 1)) for tile in call.pixels]


def _pairs(call: Call) -> list[Item]:
    """Each image in two sizes."""
    large = call.pictures("high_res_pixel_values")
    pairs = zip(call.pixels.split(1), large.split(1), strict=True)
    return [Item(small, (1, 1, 1), crops=crop) for small, crop in pairs]


def _views(call: Call) -> list[Item]:
    """A view of each whole image, and the crops of all images one after the other."""
    pixels = call.pixels
    views, counts = pixels.split(1), call.arguments.get("num_local_patches")
    counts = [0] * len(views) if counts is None else torch.as_tensor(counts).tolist()
    crops = pixels[:0] if call.arguments.get("pixel_values_local") is None else call.pictures("pixel_values_local")
    parts = _parts(crops, counts, "pixel_values_local")
    return [
        Item(view, (1 + len(own), 1, 1), crops=own if len(own) else None)
        for view, own in zip(views, parts, strict=True)
    ]


def _packed_tiles(call: Call) -> list[Item]:
    """Tiles of each image, padded to one number; or the frames of each video."""
    if call.modality == "video":
        return [Item(frames, (len(frames), 1, 1), "video") for frames in call.pixels]
    counts, pixels = _tile_counts(call), call.pixels
    if pixels.dim() == 5:
        pixels = torch.cat([tiles[:count] for tiles, count in zip(pixels, counts, strict=True)])
    return [Item(tiles, (len(tiles), 1, 1)) for tiles in _parts(pixels, counts, "pixel_values")]


def _tile_counts(call: Call) -> list[int]:
    """Tiles of each image; images that share a prompt with others are not cut."""
    from transformers.models.llava_onevision import modeling_llava_onevision  # noqa: PLC0415  # of one model

    config, sizes = call.model.config, call.required("image_sizes")
    images = call.arguments.get("batch_num_images")
    alone = [True] * len(sizes) if images is None else [int(n) == 1 for n in images for _ in range(int(n))]
    count = modeling_llava_onevision.image_size_to_num_patches
    return [
        count(size, config.image_grid_pinpoints, config.vision_config.image_size) if cut else 1
        for size, cut in zip(sizes, alone, strict=True)
    ]


def _packed(call: Call, rows: list[Tensor]) -> Features:
    """As the model itself packs rows of tiles: without padding, with line breaks; frames pooled."""
    model = call.model
    side = model.config.vision_config.image_size // model.config.vision_config.patch_size
    if call.modality == "video":
        line_break = model.image_newline[None].to(rows[0].device)
        pooled = [model.apply_pooling(clip.unflatten(0, (-1, side * side))).flatten(0, 1) for clip in rows]
        return torch.stack([torch.cat([clip, line_break]) for clip in pooled])
    features, _ = model.pack_image_features(
        [image.unflatten(0, (-1, side * side)) for image in rows],
        call.required("image_sizes"),
        image_newline=model.image_newline,
        vision_aspect_ratio=call.arguments.get("vision_aspect_ratio") or model.config.vision_aspect_ratio,
    )
    return features  # type: ignore[no-any-return]


# -- models ----------------------------------------------------------------------------------------

_PATCHES = Layout(_patches)
_IMAGES = Layout(_whole_images)
_TILES = Layout(_tiles, _stacked)
_VIEWS = Layout(_views)

LAYOUTS: Mapping[str, Layout] = {
    "qwen2_vl": _PATCHES,
    "qwen2_5_vl": _PATCHES,
    "qwen3_vl": _PATCHES,
    "qwen3_vl_moe": _PATCHES,
    "qwen3_5": _PATCHES,
    "qwen3_5_moe": _PATCHES,
    "qwen2_5_omni_thinker": _PATCHES,
    "qwen3_omni_moe_thinker": _PATCHES,
    "glm4v": _PATCHES,
    "glm46v": _PATCHES,
    "glm4v_moe": _PATCHES,
    "glm_ocr": _PATCHES,
    "kimi_k25": _PATCHES,
    "paddleocr_vl": _PATCHES,
    "minimax_m3_vl": _PATCHES,
    "ernie4_5_vl_moe": _PATCHES,
    "internvl": _TILES,
    "llava_onevision": Layout(_packed_tiles, _packed),
    "gemma4": Layout(_positioned),
    "gemma3": _TILES,
    "deepseek_vl": _TILES,
    "deepseek_vl_hybrid": Layout(_pairs, _stacked),
    "deepseek_ocr2": _VIEWS,
    "llama4": Layout(_tiles, _stacked, before_projector=True),
    "step3p7": _VIEWS,
    "llava": _IMAGES,
    "mistral3": _IMAGES,
}
"""By the `model_type` of the module that has the methods."""

_SAME = {
    "qwen2_5_omni": "qwen2_5_omni_thinker",
    "qwen3_omni_moe": "qwen3_omni_moe_thinker",
    "internvl_chat": "internvl",
    "step3_vl": "step3p7",
    "step_robotics": "step3p7",
}
"""Checkpoints of another layout, or with more parts, of the same tower."""


def tower_type(model_type: str) -> str:
    """The name in `LAYOUTS`, if it is there, of a model or of the service that has its tower."""
    return _SAME.get(model_type, model_type)
