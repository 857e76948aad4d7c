"""Embeddings as inputs of vLLM: `multi_modal_data` of its offline API, content parts of its OpenAI server.

Rows keep their deepstack levels, `[main | level 0 | ...]`: vLLM's Qwen3-VL splits them itself. Shapes are those that
the parsers of vLLM 0.33 take; docs/vllm.md has the models.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vitwire._delivery.memory import empty
from vitwire.embeddings import Embedding
from vitwire.integrations.vllm.tensors import TorchFile, torch_base64
from vitwire.items import Modality
from vitwire.model import Model

if TYPE_CHECKING:
    import torch

Grid = tuple[int, int, int]

WITH_GRIDS = {
    "qwen2_vl": "",
    "dots_ocr": "",
    "qwen2_5_vl": "second_per_grid_ts",
    "qwen2_5_omni": "second_per_grid_ts",
    "qwen2_5_omni_thinker": "second_per_grid_ts",
    "qwen3_omni_moe": "second_per_grid_ts",
    "qwen3_omni_moe_thinker": "second_per_grid_ts",
    "qwen3_vl": "timestamps",
    "qwen3_vl_moe": "timestamps",
    "qwen3_5": "timestamps",
    "qwen3_5_moe": "timestamps",
}
"""Models whose embeddings come with their grids, and the field that has the times of a clip."""
WITHOUT_GRIDS = ("internvl", "internvl_chat")
"""Models that take the rows alone, and of images only."""


def image_embeds(
    embeddings: Sequence[Embedding],
    model: Model,
    *,
    modality: Modality = "image",
    timestamps: Sequence[Sequence[float]] | None = None,
) -> dict[str, Any]:
    """`multi_modal_data` of a prompt for vLLM's offline API, made with `enable_mm_embeds=True`. Needs torch.

    The rows of a single embedding share its memory.

    embeddings: those of the prompt's images (or clips), in order.
    model: `Client.model()` of the server that encoded them.
    timestamps: of each clip, the seconds of each of its `t` groups of frames; Qwen3-VL and Qwen3.5 need them. Default:
        for files, from their reports.
    Raises ValueError for a model or an embedding that vLLM has no input for.
    """
    for number, embedding in enumerate(embeddings):
        _check(embedding, model, modality, f"embeddings[{number}]")
    rows = [embedding.torch().cpu() for embedding in embeddings]
    if model.model_type in WITHOUT_GRIDS:
        return {modality: rows}
    import torch  # noqa: PLC0415  # not a dependency of the client

    fields: dict[str, Any] = {
        f"{modality}_embeds": _joined(rows),
        f"{modality}_grid_thw": torch.tensor([embedding.grid for embedding in embeddings]),
    }
    times = [
        _times_of(embedding, model, modality, None if timestamps is None else timestamps[number])
        for number, embedding in enumerate(embeddings)
    ]
    for name in times[0] if times else ():  # in float64, as vLLM rounds them for the prompt
        fields[name] = [torch.tensor(each[name], dtype=torch.float64) for each in times]
    return {modality: fields}


def _joined(rows: "Sequence[torch.Tensor]") -> "torch.Tensor":
    """All rows in one tensor, whose memory is reused once it is released; of one embedding they are not copied."""
    import torch  # noqa: PLC0415  # as above

    if len(rows) == 1:
        return rows[0]
    if len({each.dtype for each in rows}) != 1:
        return torch.cat(list(rows))
    kind, width = rows[0].dtype, rows[0].shape[1]
    memory = empty((sum(map(len, rows)), width * kind.itemsize), np.uint8)
    return torch.cat(list(rows), out=torch.from_numpy(memory).view(kind))


def image_part(embedding: Embedding, model: Model, *, uuid: str | None = None) -> dict[str, Any]:
    """A content part of a chat completion with the embedding inline; the server needs `--enable-mm-embeds`.

    model: `Client.model()` of the server that encoded it.
    uuid: names the content in vLLM's caches, in place of a hash of the embedding; use a hash of the image.
    Raises ValueError for a model or an embedding that vLLM has no input for.
    """
    return _part(embedding, model, "image", {}, uuid)


def unencoded_image_part(embedding: Embedding, model: Model, *, uuid: str) -> dict[str, Any]:
    """As `image_part`, with the rows as a `TorchFile`, which encodes them when they are sent."""
    return _part(embedding, model, "image", {}, uuid, TorchFile)


def video_part(
    embedding: Embedding, model: Model, *, timestamps: Sequence[float] | None = None, uuid: str | None = None
) -> dict[str, Any]:
    """As `image_part`, of a clip.

    timestamps: the seconds of each of its `t` groups of frames; default: from the report of a file.
    """
    return _part(embedding, model, "video", _times_of(embedding, model, "video", timestamps), uuid)


def unencoded_video_part(embedding: Embedding, model: Model, *, uuid: str) -> dict[str, Any]:
    """As `video_part` of a clip's file, with the rows as a `TorchFile`, which encodes them when they are sent."""
    return _part(embedding, model, "video", _times_of(embedding, model, "video", None), uuid, TorchFile)


def check_clips(model: Model) -> None:
    """Raises ValueError for a model that vLLM takes no embeddings of clips for."""
    if model.model_type not in WITH_GRIDS:
        raise ValueError(_unsupported(model, "embeddings of videos", WITH_GRIDS))


def reference_part(
    grid: Grid,
    model: Model,
    uuid: str,
    *,
    modality: Modality = "image",
    timestamps: Sequence[float] | None = None,
    second_per_grid: float = 0.0,
) -> dict[str, Any]:
    """A content part without the embedding, which vLLM's `VitwireECConnector` fetches from the server.

    uuid: the `content_id` under which the server has the embedding cached.
    timestamps: of a clip, the seconds of each of its `t` groups of frames.
    second_per_grid: of a clip's file, as `Accepted` has it.
    Raises ValueError for a model that vLLM does not take such parts for, and for an invalid uuid.
    """
    if not uuid:
        raise ValueError("uuid must be the content_id of a cached embedding, got an empty one")
    if model.model_type not in WITH_GRIDS:
        raise ValueError(_unsupported(model, "a part without its embedding", WITH_GRIDS))
    _tokens(grid, model, modality, "grid")
    metadata = {f"{modality}_grid_thw": list(grid)} | _times(grid, model, modality, timestamps, second_per_grid)
    kind = f"{modality}_embeds"
    return {"type": kind, kind: metadata, "uuid": uuid}


def _part(
    embedding: Embedding,
    model: Model,
    modality: Modality,
    times: dict[str, list[float]],
    uuid: str | None,
    encode: Callable[[npt.NDArray[Any], str], str | TorchFile] = torch_base64,
) -> dict[str, Any]:
    _check(embedding, model, modality, "embedding")
    kind = f"{modality}_embeds"
    rows = encode(embedding._host(), embedding.dtype)  # noqa: SLF001  # the rows as received, without torch
    content: str | TorchFile | dict[str, str | TorchFile] = rows
    if model.model_type in WITH_GRIDS:
        grid = torch_base64(np.array(embedding.grid, np.int64), "int64")
        content = {kind: rows, f"{modality}_grid_thw": grid} | {
            name: torch_base64(np.array(values, np.float64), "float64") for name, values in times.items()
        }
    return {"type": kind, kind: content} | ({"uuid": uuid} if uuid else {})


def _check(embedding: Embedding, model: Model, modality: Modality, field: str) -> None:
    """Raises ValueError if vLLM cannot take this embedding."""
    if modality == "video":
        check_clips(model)
    elif model.model_type not in WITH_GRIDS and model.model_type not in WITHOUT_GRIDS:
        raise ValueError(_unsupported(model, "embeddings of images", (*WITH_GRIDS, *WITHOUT_GRIDS)))
    if embedding.report.kept:
        raise ValueError(f"{field}: its tokens were pruned, and vLLM expects all of them; encode without keep_ratio")
    rows, width = embedding.shape
    if width != model.embedding_width:
        raise ValueError(f"{field} is {width} wide, but {model.model_id} has width {model.embedding_width}")
    if model.model_type in WITH_GRIDS:
        tokens = _tokens(embedding.grid, model, modality, f"{field}.grid")
        if rows != tokens:
            raise ValueError(f"{field}: {rows} rows, its grid {embedding.grid} has {tokens}")


def _tokens(grid: Grid, model: Model, modality: Modality, field: str) -> int:
    """Tokens of a grid. Raises ValueError for one that the model cannot have."""
    t, h, w = grid
    if min(grid) < 1 or h % model.merge_size or w % model.merge_size:
        raise ValueError(f"{field}: {grid} is not (t, h, w) with h and w multiples of {model.merge_size}")
    if modality == "image" and t > 1:
        raise ValueError(f"{field}: {grid} is the grid of a clip; pass it as a video")
    return t * h * w // model.merge_size**2


def _times_of(
    embedding: Embedding, model: Model, modality: Modality, timestamps: Sequence[float] | None
) -> dict[str, list[float]]:
    """As `_times`; by default of the report, which has none of images, clips in memory and files without a rate."""
    if timestamps is not None:
        return _times(embedding.grid, model, modality, timestamps)
    report = embedding.report
    seconds = model.group_seconds(report.frame_seconds) or None
    return _times(embedding.grid, model, modality, seconds, report.second_per_grid)


def _times(
    grid: Grid, model: Model, modality: Modality, timestamps: Sequence[float] | None, second_per_grid: float = 0.0
) -> dict[str, list[float]]:
    """The field with the times of a clip. Raises ValueError if it is missing or does not fit the grid."""
    name = WITH_GRIDS.get(model.model_type)
    if modality == "image":
        return {}
    if timestamps is not None and len(timestamps) != grid[0]:
        raise ValueError(f"timestamps: {len(timestamps)} for a clip of {grid[0]} groups of frames")
    if name == "timestamps":
        if timestamps is None:
            raise ValueError(f"timestamps: {model.model_type} needs the seconds of each group of frames")
        return {name: [float(each) for each in timestamps]}
    if name and not second_per_grid and timestamps is not None and len(timestamps) > 1:
        second_per_grid = float(timestamps[-1] - timestamps[0]) / (len(timestamps) - 1)
    return {name: [second_per_grid]} if name and second_per_grid else {}


def _unsupported(model: Model, what: str, supported: Sequence[str] | dict[str, str]) -> str:
    return f"vLLM does not take {what} for {model.model_type or 'a nameless model'}; it does for {', '.join(supported)}"
