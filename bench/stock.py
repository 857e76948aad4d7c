"""How plain transformers computes the rows of images: stock models with the inputs of their own processors.

Each function takes the model, the pixels of each image as the engine takes them and their grids. It lays out the
model's inputs on the device, and returns a forward, which gives all rows, those of one image after the other.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vitwire_server.core.grids import Grid

Forward = Callable[[], Tensor]
Plain = Callable[[Any, Sequence[Tensor], Sequence[Grid]], Forward]


def tiles(model: Any, pixels: Sequence[Tensor], grids: Sequence[Grid]) -> Forward:
    """`get_image_features` of tiles that are one image each."""
    del grids
    given = torch.cat(list(pixels))
    return lambda: _joined(model.get_image_features(pixel_values=given).pooler_output)


def nested_tiles(model: Any, pixels: Sequence[Tensor], grids: Sequence[Grid]) -> Forward:
    """`get_image_features` of the tiles of one prompt."""
    del grids
    given = torch.cat(list(pixels))[None]
    return lambda: _joined(model.get_image_features(pixel_values=given).pooler_output)


def single_tiles(model: Any, pixels: Sequence[Tensor], grids: Sequence[Grid]) -> Forward:
    """`get_image_features` of LLaVA-OneVision, which appends a line break to each image; images are not cut."""
    del grids
    given = torch.cat(list(pixels))
    sizes = torch.tensor([list(given.shape[2:])] * len(given), device=given.device)
    counts = [len(given) + 1] * len(given)  # more than one image a prompt: the processor cuts none of them

    def forward() -> Tensor:
        rows = model.get_image_features(given, image_sizes=sizes, batch_num_images=counts).pooler_output
        return torch.cat([own.reshape(-1, own.shape[-1])[:-1] for own in rows])

    return forward


def attended_tiles(model: Any, pixels: Sequence[Tensor], grids: Sequence[Grid]) -> Forward:
    """The vision side of Llama 3.2's forward; each image has as many tiles as any can have."""
    given = torch.stack(list(pixels))[:, None]
    layouts = [list(layout) for layout in model.config.vision_config.supported_aspect_ratios]
    ids = torch.tensor([[1 + layouts.index([grid.h, grid.w])] for grid in grids], device=given.device)
    mask = torch.ones((len(given), 1, given.shape[2]), dtype=torch.int64, device=given.device)
    return lambda: model.multi_modal_projector(model.vision_model(given, ids, mask).last_hidden_state).flatten(0, -2)


def pooled_tiles(model: Any, pixels: Sequence[Tensor], grids: Sequence[Grid]) -> Forward:
    """What an encoder that is served alone pools of each image."""
    del grids
    given = torch.cat(list(pixels))
    features = getattr(model, "get_image_features", model)

    def forward() -> Tensor:
        output = features(pixel_values=given)
        projected = getattr(output, "image_embeds", None)
        return output.pooler_output if projected is None else projected  # type: ignore[no-any-return]

    return forward


def whole_images(model: Any, pixels: Sequence[Tensor], grids: Sequence[Grid]) -> Forward:
    """`get_image_features` of images that are put together of their patches, with their sizes."""
    side = model.config.vision_config.patch_size
    given = torch.cat([_image(own, grid, side) for own, grid in zip(pixels, grids, strict=True)])
    sizes = torch.tensor([[grid.h * side, grid.w * side] for grid in grids], device=given.device)
    return lambda: _joined(model.get_image_features(pixel_values=given, image_sizes=sizes).pooler_output)


def masked_patches(model: Any, pixels: Sequence[Tensor], grids: Sequence[Grid]) -> Forward:
    """`get_image_features` of rows of patches, none of them padding, as images are of one size."""
    given = torch.stack(list(pixels))
    shapes = torch.tensor([[grid.h, grid.w] for grid in grids], device=given.device)
    mask = torch.ones(given.shape[:2], dtype=torch.int32, device=given.device)
    return lambda: _joined(
        model.get_image_features(given, spatial_shapes=shapes, pixel_attention_mask=mask).pooler_output
    )


def grids_thw(model: Any, pixels: Sequence[Tensor], grids: Sequence[Grid]) -> Forward:
    """`get_image_features` of packed patches with their grids."""
    given = torch.cat(list(pixels))
    listed = torch.tensor(grids, device=given.device)
    return lambda: _joined(model.get_image_features(given, listed).pooler_output)


def _image(patches: Tensor, grid: Grid, side: int) -> Tensor:
    """An image `(1, C, H, W)` of its patches, which are in raster order."""
    image = patches.view(grid.h, grid.w, -1, side, side).permute(2, 0, 3, 1, 4)
    return image.reshape(1, -1, grid.h * side, grid.w * side)


def _joined(rows: Tensor | Sequence[Tensor]) -> Tensor:
    parts = [rows] if isinstance(rows, Tensor) else rows
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
