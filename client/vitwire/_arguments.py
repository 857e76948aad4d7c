"""The items of what callers pass to `encode_images`, `encode_clips` and `encode_batch`."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypedDict, TypeVar, Unpack

import numpy as np

from vitwire._inputs.processors import batch_cuts
from vitwire._inputs.sources import (
    Clip,
    FileObject,
    ImageLike,
    Loaded,
    PillowImage,
    file_bytes,
    loaded,
    pixels_of,
    pixels_of_frames,
)
from vitwire._inputs.tensors import invalid
from vitwire.embeddings import DType
from vitwire.errors import EncodeFailed, InvalidItem
from vitwire.items import Item, Modality, Priority, ids_of, items_of
from vitwire.model import Model
from vitwire.shared.file_kinds import NOT_HEIC, kind_of

S = TypeVar("S")
T = TypeVar("T")


class CallOptions(TypedDict, total=False):
    """Options of every method that encodes; None, or left out: the client's."""

    timeout: float | None
    output_type: DType | None
    priority: Priority | None


class IterOptions(CallOptions, total=False):
    """Options of `iter_encode`."""

    groups: bool


class ImageOptions(CallOptions, total=False):
    """Options of `encode_images`."""

    content_ids: Sequence[str | None] | None


class ClipOptions(ImageOptions, total=False):
    """Options of `encode_clips`."""

    keep_ratio: float


class BatchOptions(ClipOptions, total=False):
    """Options of `encode_batch`."""

    modality: Modality
    crops: object


def image_items(images: Sequence[ImageLike], model: Model, options: ImageOptions) -> list[Item]:
    """One item per image: a file as it is, or a picture. Raises InvalidItem for one that cannot be used."""
    _check_prepared(model, "image")
    _check_list(images, "images", dimensions=3)
    items = [_indexed(lambda image: _item(loaded(image), model), *each) for each in enumerate(images)]
    return _identified(items, options.get("content_ids"))


def clip_items(clips: Sequence[Clip], model: Model, options: ClipOptions) -> list[Item]:
    """One item per clip, its frames in one array. Raises InvalidItem for one that cannot be used."""
    _check_prepared(model, "video")
    _check_list(clips, "clips", dimensions=4)
    items = [_indexed(lambda clip: Item(pixels_of_frames(clip), modality="video"), *each) for each in enumerate(clips)]
    return _identified(items, options.get("content_ids"), options.get("keep_ratio", 0.0))


def batch_items(
    pixel_values: object, grid_thw: object = None, model: Model | None = None, **options: Unpack[BatchOptions]
) -> list[Item]:
    content_ids, keep_ratio, crops = options.get("content_ids"), options.get("keep_ratio", 0.0), options.get("crops")
    modality = options.get("modality", "image")
    if isinstance(pixel_values, Mapping):
        if crops is not None:
            raise invalid("crops", "are among the processor's outputs already; pass either")
        return Item.from_processor(
            pixel_values, model, grid_thw=grid_thw, content_ids=content_ids, keep_ratio=keep_ratio
        )
    cuts = batch_cuts(pixel_values, grid_thw, crops, is_video=modality == "video", model=model)
    return list(items_of(cuts, modality, ids_of(content_ids, len(cuts)), keep_ratio))


def _identified(items: Sequence[Item], content_ids: Sequence[str | None] | None, keep_ratio: float = 0.0) -> list[Item]:
    ids = ids_of(content_ids, len(items))
    return [replace(item, content_id=own, keep_ratio=keep_ratio) for item, own in zip(items, ids, strict=True)]


def _item(source: Loaded, model: Model) -> Item:
    if not isinstance(source, str | bytes | os.PathLike):
        return Item(pixels_of(source))
    data = file_bytes(source)
    kind, accepted = kind_of(data), ", ".join(model.encodings)
    if kind == "heic":
        raise ValueError(f"the file is {NOT_HEIC}")
    if kind not in model.encodings:
        advice = "open it with Pillow and pass the image"
        raise ValueError(f"the file's format is {kind or 'unknown'}, the server decodes {accepted}: {advice}")
    if len(data) > model.limits.encoded_bytes:
        raise ValueError(f"the file has {len(data)} bytes, the server takes at most {model.limits.encoded_bytes}")
    return Item(encoded=data)


def _check_list(sources: object, what: str, *, dimensions: int) -> None:
    """Raises TypeError for a single image or clip, which would be iterated over as if it were a list."""
    alone = isinstance(sources, np.ndarray) and sources.ndim <= dimensions
    single = isinstance(sources, str | bytes | bytearray | memoryview | os.PathLike)
    if alone or single or isinstance(sources, PillowImage | FileObject):
        raise TypeError(f"expected a list of {what}, got a single {type(sources).__name__}")


def _check_prepared(model: Model, modality: Modality) -> None:
    if modality not in model.prepared:
        raise EncodeFailed(
            f"the server prepares no {modality}s for {model.model_type}: it runs with --decode-processes 0, or the "
            "model takes none, or takes only its processor's output (encode_batch)",
            code="UNIMPLEMENTED",
        )


def _indexed(make: Callable[[S], T], index: int, source: S) -> T:
    """Raises InvalidItem, with the position, for a source that cannot be used."""
    try:
        return make(source)
    except OSError as error:
        raise InvalidItem(f"the file cannot be read: {error}", item=index) from error
    except (ValueError, TypeError) as error:
        raise InvalidItem(str(error), item=index) from error
