"""Outputs of Hugging Face processors, as they are, cut into images and clips.

The keys that a processor sets determine the layout of its tensors; docs/client.md has the table.
"""

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from vitwire._inputs.layouts import (
    FLATTENED,
    LAYOUT_IDS,
    PHI4_PIXELS,
    PIXEL_MASK,
    images_of_canvases,
    images_of_flattened_patches,
    images_of_layouts,
    images_of_masks,
)
from vitwire._inputs.splitting import (
    Cut,
    Grids,
    beside_overviews,
    cut,
    cut_slices,
    cut_with_crops,
    fitted,
    patches_of_strip,
    with_overviews,
    without_padding,
)
from vitwire._inputs.tensors import Batch, check_rank, integers, invalid, joined, on_host, rank

if TYPE_CHECKING:
    from vitwire.model import Model

Outputs = Mapping[str, object]

_PIXELS, _CLIPS = "pixel_values", "pixel_values_videos"
_IMAGE_GRIDS = (
    "image_grid_thw",
    "grid_thws",
    "grid_thw",
    "image_grid_hws",
    "image_grid_hw",
    "spatial_shapes",
    "num_patches",
)
"""Keys with the grids, sizes in patches or numbers of tiles of images."""
_LAYOUTS = ("aspect_ratios", "grids", "tilings")
"""Keys with the rows and columns of tiles that images were cut in."""
_UNCUT = "batch_num_images"
"""Key of a processor that cuts no image of a prompt with several."""
_WHOLE_IMAGES = ("idefics2",)
"""Models whose processors emit whole images, padded to one size, that are cut into patches here."""
_MERGED = {"image_merge_sizes": 1, "video_merge_sizes": 2}
"""Roots of the patches of a token that servers merge."""


def processor_cuts(
    outputs: Outputs, model: "Model | None" = None, grid_thw: object = None
) -> tuple[list[Cut], list[Cut]]:
    """The images and the clips. See `Item.from_processor`."""
    if not isinstance(outputs, Mapping):
        raise invalid("outputs", f"expected what a processor returns, got {type(outputs).__name__}")
    _check_merged(outputs)
    if _has(outputs, "tile_fine_mask"):  # pages of Granite for Docling with more tokens than servers make of a tile
        raise invalid("tile_fine_mask", "is unsupported: call the processor without fine_route")
    images: list[Cut] = []
    clips: list[Cut] = []
    if _has(outputs, PHI4_PIXELS):
        images = images_of_canvases(outputs)
    elif model is not None and model.model_type == "phi3_v" and _has(outputs, "image_sizes"):
        images = images_of_canvases(outputs, _patch_size(model))
    elif _has(outputs, FLATTENED):
        images = images_of_flattened_patches(outputs)
    elif outputs.get(_PIXELS) is not None:
        images = _images(outputs, model, grid_thw)
    if outputs.get(_CLIPS) is not None:
        clips = _clips(outputs)
    if not any(_has(outputs, key) for key in (_PIXELS, PHI4_PIXELS, FLATTENED, _CLIPS)):
        raise invalid(
            "outputs", f"has neither {_PIXELS} nor {_CLIPS}; its keys: {', '.join(map(str, outputs)) or 'none'}"
        )
    return images, clips


def batch_cuts(
    pixel_values: object,
    grid_thw: object = None,
    crops: object = None,
    *,
    is_video: bool = False,
    model: "Model | None" = None,
) -> list[Cut]:
    """The parts of a processor's tensors, without its other outputs. See `Client.encode_batch`."""
    batch = on_host(pixel_values, "pixel_values")
    if crops is not None:
        views = Grids(_PIXELS, [(1,)] * len(batch)) if grid_thw is None else Grids.of("grid_thw", grid_thw, least=0)
        return cut_with_crops(batch, _PIXELS, views, on_host(crops, "crops"), "crops")
    if is_video and grid_thw is None and len(batch) and rank(batch) == 5:
        grids = Grids(_PIXELS, [(len(clip),) for clip in batch])
    else:
        grids = _image_grids({}, batch, model, grid_thw)
    return cut(batch, _PIXELS, grids, _patch_size(model))


def _images(  # noqa: PLR0911  # one for each kind of output
    outputs: Outputs, model: "Model | None", grid_thw: object
) -> list[Cut]:
    if _has(outputs, LAYOUT_IDS):
        return images_of_layouts(outputs)
    if _has(outputs, PIXEL_MASK) and grid_thw is None:
        return images_of_masks(outputs, _patch_size(model))
    batch = on_host(outputs[_PIXELS], _PIXELS)
    if _has(outputs, "tgt_sizes"):
        return cut_slices(batch, _PIXELS, outputs["tgt_sizes"], "tgt_sizes")
    if _has(outputs, "high_res_pixel_values"):
        high = on_host(outputs["high_res_pixel_values"], "high_res_pixel_values")
        return cut_with_crops(batch, _PIXELS, Grids(_PIXELS, [(1, 1, 1)] * len(batch)), high, "high_res_pixel_values")
    if _has(outputs, "num_local_patches"):
        grids = Grids.of("num_local_patches", outputs["num_local_patches"], least=0)
        local = outputs.get("pixel_values_local")
        crops = [] if local is None else on_host(local, "pixel_values_local")
        views = Grids(grids.field, [(1 + count, 1, 1) for count in grids.patches()])
        return cut_with_crops(batch, _PIXELS, views, crops, "pixel_values_local")
    if _has(outputs, "target_sizes"):
        return cut(patches_of_strip(batch, _PIXELS), _PIXELS, Grids.of("target_sizes", outputs["target_sizes"]))
    if model is not None and model.model_type in _WHOLE_IMAGES:
        return _padded_images(outputs, batch, model.patch_size)
    return cut(batch, _PIXELS, _image_grids(outputs, batch, model, grid_thw), _patch_size(model))


def _check_merged(outputs: Outputs) -> None:
    """VideoLLaMA 3's processors say how many patches of each item are merged; servers have one number for each kind."""
    for key, served in _MERGED.items():
        if _has(outputs, key) and any(size != served for size in integers(outputs[key], key).flat):
            raise invalid(key, f"must be {served} for each item, which is what the model was published with")


def _padded_images(outputs: Outputs, batch: Batch, side: int) -> list[Cut]:
    """Images of prompts `(prompts, images, 3, H, W)`, without padding, cut into the patches that are whole.

    Images of zeros are padding, unless all are.
    """
    check_rank(batch, _PIXELS, 5, "images of prompts (prompts, images, 3, H, W)")
    key = "pixel_attention_mask"
    masks = integers(outputs[key], key) if _has(outputs, key) else None
    images = [(at, number, image) for at, prompt in enumerate(batch) for number, image in enumerate(prompt)]
    real = [each for each in images if bool(each[2].any())] or images
    sizes: list[tuple[int, ...]] = []
    for at, number, image in real:
        height, width = image.shape[1:]
        if masks is not None:
            height, width = (int(masks[at, number].any(axis).sum()) for axis in (1, 0))
        sizes.append((height // side * side, width // side * side))
    return cut([image for _, _, image in real], _PIXELS, Grids(key, sizes), side)


def _image_grids(  # noqa: PLR0911  # one for each kind of output
    outputs: Outputs, batch: Batch, model: "Model | None", grid_thw: object
) -> Grids:
    """The size of each image, as the caller or the processor says."""
    if grid_thw is not None:
        return Grids.of("grid_thw", grid_thw)
    if key := next((key for key in _IMAGE_GRIDS if _has(outputs, key)), None):
        return Grids.of(key, outputs[key])
    if _has(outputs, "image_position_ids"):
        return _positions("image_position_ids", outputs["image_position_ids"])
    if _has(outputs, "images_spatial_crop"):
        return beside_overviews("images_spatial_crop", outputs["images_spatial_crop"])
    if key := next((key for key in _LAYOUTS if _has(outputs, key)), None):
        return with_overviews(Grids.of(key, outputs[key]), always=key == "tilings")
    if len(batch) and rank(batch) == 5:
        tiles = model.tiles if model else None
        if tiles and tiles.layouts and _has(outputs, "image_sizes") and not _has(outputs, _UNCUT):
            return fitted("image_sizes", outputs["image_sizes"], tiles)
        return Grids(_PIXELS, [(count,) for count in without_padding(batch)])
    if _has(outputs, "image_sizes"):
        return Grids.of("image_sizes", outputs["image_sizes"])
    if _has(outputs, "num_crops") or (model and model.tiles and model.tiles.single):
        return Grids(_PIXELS, [(1,)] * len(batch))
    what = "image_grid_thw" if len(batch) and rank(batch) == 2 else "the number of tiles of each image"
    raise invalid("grid_thw", f"is missing: {_PIXELS} alone does not show where an image ends; pass {what}")


def _clips(outputs: Outputs) -> list[Cut]:
    batch = on_host(outputs[_CLIPS], _CLIPS)
    if _has(outputs, "video_grid_thw"):
        return cut(batch, _CLIPS, Grids.of("video_grid_thw", outputs["video_grid_thw"]))
    if _has(outputs, "target_sizes_videos"):
        sizes = Grids.of("target_sizes_videos", outputs["target_sizes_videos"])
        return cut(patches_of_strip(batch, _CLIPS), _CLIPS, sizes)
    if _has(outputs, "video_position_ids"):
        return _padded_frames(batch, outputs)
    check_rank(batch, _CLIPS, 5, "video_grid_thw or clips (batch, frames, 3, H, W)")
    return cut(batch, _CLIPS, Grids(_CLIPS, [(len(clip),) for clip in batch]))


def _padded_frames(batch: Batch, outputs: Outputs) -> list[Cut]:
    """Clips of Gemma 4: frames of patches that are padded to one length, of one clip after the other."""
    frames = _positions("video_position_ids", outputs["video_position_ids"])
    if len(batch) and rank(batch) == 4:  # before transformers 5.23, clips had an axis of their own
        counts = [len(clip) for clip in batch]
        batch = [frame for clip in batch for frame in clip]
    else:
        key = "num_frames_per_video"
        counts = [entry[0] for entry in Grids.of(key, outputs.get(key)).entries]
    cuts = cut(batch, _CLIPS, frames)
    if sum(counts) != len(cuts):
        raise invalid("num_frames_per_video", f"adds up to {sum(counts)} frames, {_CLIPS} has {len(cuts)}")
    found = []
    for start, end in pairwise(accumulate(counts, initial=0)):
        sizes = {own.grid for own in cuts[start:end]}
        if len(sizes) != 1:
            raise invalid("video_position_ids", f"frames {start} to {end} are one clip, but have the grids {sizes}")
        _, h, w = sizes.pop()
        found.append(Cut(joined([own.pixels for own in cuts[start:end]]), (end - start, h, w)))
    return found


def _positions(key: str, value: object) -> Grids:
    """Grids of patches that come with their (column, row); those of padding are negative."""
    positions = integers(value, key)
    if positions.ndim == 4:
        positions = positions.reshape(-1, *positions.shape[2:])
    if positions.ndim != 3 or positions.shape[-1] != 2:
        raise invalid(key, f"expected positions (images, patches, 2), got the shape {positions.shape}")
    return Grids(key, [(1, int(own[:, 1].max()) + 1, int(own[:, 0].max()) + 1) for own in positions])


def _patch_size(model: "Model | None") -> int | None:
    return model.patch_size if model else None


def _has(outputs: Outputs, key: str) -> bool:
    return outputs.get(key) is not None
