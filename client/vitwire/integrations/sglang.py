"""Vitwire as the vision encoder of SGLang.

`precomputed` and `expanded` are for SGLang's offline engine. SGLang's HTTP server takes no embeddings: the JSON of
`/generate` cannot carry tensors, and its content parts only have URLs. A server uses Vitwire through the command
`vitwire sglang-encoder`, which takes the place of SGLang's own encoder (`--language-only --encoder-urls`).
"""

from collections.abc import Sequence
from typing import Any

from vitwire.embeddings import Embedding
from vitwire.items import Modality

_GRIDS: dict[Modality, str] = {"image": "image_grid_thw", "video": "video_grid_thw"}


def precomputed(embeddings: Sequence[Embedding], *, modality: Modality = "image") -> list[dict[str, Any]]:
    """`image_data` (or `video_data`) of `sglang.Engine.generate` for all images (or clips) of one prompt.

        engine.generate(input_ids=expanded(ids, embeddings, image_token_id), image_data=precomputed(embeddings))

    SGLang takes exactly one such entry per modality, so the list has one entry for all embeddings: their rows in
    the order of the prompt, deepstack levels included, and their grids. The prompt must be token ids in which each
    image has one placeholder per row; see `expanded`.

    The format is `processor_output`: of SGLang's two formats, only that one skips the vision tower of every model.

    Raises ValueError for no embeddings, for pruned ones, and for widths, types or grids that do not fit together.
    """
    if not embeddings:
        raise ValueError("embeddings: expected at least one, got none")
    widths = {(each.shape[-1], each.dtype) for each in embeddings}
    if len(widths) > 1:
        raise ValueError(f"embeddings: expected one width and dtype, got {sorted(widths)}")
    unknown = [index for index, each in enumerate(embeddings) if 0 in each.grid]
    if unknown:
        raise ValueError(f"embeddings[{unknown[0]}].grid is unknown; SGLang computes positions from it")
    for index, each in enumerate(embeddings):
        if each.report.kept:
            raise ValueError(f"embeddings[{index}]: its tokens were pruned, and SGLang expects all of them")
        if modality == "image" and each.grid[0] > 1:
            raise ValueError(f"embeddings[{index}].grid: {each.grid} is the grid of a clip; pass modality='video'")
    import torch  # noqa: PLC0415  # the encoder adapter runs without it

    rows = [each.torch().reshape(-1, each.shape[-1]) for each in embeddings]
    return [
        {
            "format": "processor_output",
            "modality": modality.upper(),
            "precomputed_embeddings": rows[0] if len(rows) == 1 else torch.cat(rows),
            _GRIDS[modality]: torch.tensor([each.grid for each in embeddings], dtype=torch.int64),
        }
    ]


def expanded(input_ids: Sequence[int], embeddings: Sequence[Embedding], placeholder: int) -> list[int]:
    """The prompt's token ids with the placeholder of each image repeated once per row of its embedding.

    placeholder: the id of the token that stands for an image, `image_token_id` in the config of most models.
    """
    counts = iter([each.shape[0] for each in embeddings])
    if input_ids.count(placeholder) != len(embeddings):
        raise ValueError(
            f"input_ids: expected {len(embeddings)} placeholders (token {placeholder}), one per embedding, "
            f"got {input_ids.count(placeholder)}"
        )
    return [token for each in input_ids for token in ([each] * next(counts) if each == placeholder else [each])]
