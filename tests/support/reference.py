"""Plain transformers, which every embedding is compared with."""

import json
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from packaging.version import Version
from safetensors.torch import load_file
from torch import Tensor

from vitwire_server.demo.checkpoint import random_model

Array = NDArray[np.float32]
TOLERANCE = 1e-5
"""Relative to the largest value: float32 rounds at 6e-8, and a few hundred roundings add up."""


def stored(checkpoint: Path) -> dict[str, Tensor]:
    """The weights of all shards, by their own names."""
    shards = sorted(checkpoint.glob("*.safetensors"))
    return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}


class Alone:
    """A reference that is asked for one item at a time."""

    def item(self, grid: tuple[int, int, int], pixels: Tensor, crops: Tensor | None = None) -> Array:
        """The embedding of one item."""
        raise NotImplementedError

    def encode(self, pixels: Tensor, grids: Sequence[tuple[int, int, int]]) -> list[Array]:
        """Embeddings of items whose patches lie one after the other, each alone."""
        parts = torch.split(torch.as_tensor(pixels), [prod(grid) for grid in grids])
        return [self.item(grid, part) for grid, part in zip(grids, parts, strict=True)]


class Reference:
    """The whole model of a checkpoint, stock, and what it hands its LLM of an image or a clip."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        settings = json.loads((checkpoint / "config.json").read_text())
        model: Any = getattr(transformers, settings["architectures"][0]).from_pretrained(checkpoint, dtype=dtype)
        self.model = as_published(model).eval().to(device)
        thinker = getattr(model, "thinker", getattr(model, "vlm", model))
        # Before 5.18, the thinkers had their vision tower beside the language model rather than within `model`.
        self.core: Any = thinker.model if _has_tower(thinker) else thinker
        self.vision_config: Any = self.core.config.vision_config
        self.dtype = dtype

    @torch.inference_mode()
    def encode(self, pixels: Tensor | NDArray[Any], grids: Sequence[tuple[int, int, int]]) -> list[Array]:
        """Embeddings `[main | deepstack ...]` of items whose patches lie one after the other, each alone."""
        packed = torch.as_tensor(pixels).to(self.model.device, self.dtype)
        items = torch.split(packed, [prod(grid) for grid in grids])
        rows = (
            self.rows(own, torch.tensor([grid], device=packed.device)) for own, grid in zip(items, grids, strict=True)
        )
        return [own.float().cpu().numpy() for own in rows]

    def item(self, grid: tuple[int, int, int], pixels: Tensor, crops: Tensor | None = None) -> Array:
        """The embedding of one item; models of patches take no crops."""
        assert crops is None
        return self.encode(pixels, [grid])[0]

    def rows(self, pixels: Tensor, grid: Tensor) -> Tensor:
        """Rows of one item, from what the model hands its LLM."""
        features = self.core.get_image_features if grid[0, 0] == 1 else self.core.get_video_features
        output = features(self.shaped(pixels), grid)
        deepstack = getattr(output, "deepstack_features", None) or []
        return torch.cat([_joined(part) for part in (output.pooler_output, *deepstack)], dim=-1)

    def shaped(self, pixels: Tensor) -> Tensor:
        """Rows of patches as the model's own processor emits them."""
        return pixels


def as_published(model: Any) -> Any:
    """A model that reads Muse Glimmer's learned positions as Meta's code does, which transformers does since 5.24."""
    if model.config.model_type == "muse_glimmer" and Version(transformers.__version__) < Version("5.24"):
        embedder = model.model.vision_tower.patch_embedder
        embedder.register_forward_pre_hook(lambda _, given: (given[0], given[1][:, [0, 2, 1]]))
    return model


class VideoLlama3(Reference):
    """Asked with the merge sizes that its processors give: 1 for images, 2 for clips."""

    def rows(self, pixels: Tensor, grid: Tensor) -> Tensor:
        merge = torch.tensor([1 if grid[0, 0] == 1 else 2], device=grid.device)
        return torch.cat(list(self.core.get_image_features(pixels, grid, merge).pooler_output))


class SquarePatches(Reference):
    """A model whose processor emits `(patches, C, p, p)`."""

    def shaped(self, pixels: Tensor) -> Tensor:
        side = self.vision_config.patch_size
        return pixels.view(len(pixels), -1, side, side)


class Kimi(SquarePatches):
    """transformers' own get_video_features counts the tokens of all frames, which were averaged."""

    def rows(self, pixels: Tensor, grid: Tensor) -> Tensor:
        pooled = self.core.vision_tower(self.shaped(pixels), grid_thw=grid).pooler_output
        rows: Tensor = self.core.mm_projector(pooled).squeeze(1)
        return rows


def renamed(reference: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The reference of a model that transformers has under other names: of its demo, as transformers writes it."""

    def make(_: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
        with TemporaryDirectory() as folder:
            random_model(name).save_pretrained(folder)
            return reference(Path(folder), dtype, device)

    return make


def _has_tower(model: Any) -> bool:
    return hasattr(getattr(getattr(model, "model", None), "config", None), "vision_config")


def _joined(parts: Tensor | Sequence[Tensor]) -> Tensor:
    return parts if isinstance(parts, Tensor) else torch.cat(tuple(parts))


def error(rows: Array, expected: Array) -> float:
    """Largest difference over the largest expected value; infinite where shapes differ or NaN shows."""
    if rows.shape != expected.shape or not np.isfinite(rows).all():
        return float("inf")
    return float(np.abs(rows - expected).max() / np.abs(expected).max())


def kept_tokens(rows: NDArray[Any], frames: int, ratio: float) -> tuple[list[int], float]:
    """What Efficient Video Sampling (arXiv 2510.14624) keeps of main rows, and how clear the choice is.

    Written down from the description: 1 - cosine with the token at the same place one frame before,
    the first frame above all, the best of them in their own order. The second value is the distance
    between the last token that was kept and the first that was not.
    """
    frame = len(rows) // frames
    clip = rows.astype(np.float64).reshape(frames, frame, -1)
    norms = np.linalg.norm(clip, axis=-1)
    products = (clip[1:] * clip[:-1]).sum(-1)
    lengths = norms[1:] * norms[:-1]
    cosine = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
    dissimilarity = np.concatenate([np.full((1, frame), 255.0), 1 - cosine]).ravel()
    retained = max(frame, int(len(rows) * ratio))
    order = np.argsort(-dissimilarity, kind="stable")
    ranked = dissimilarity[order]
    clear = float(ranked[retained - 1] - ranked[retained]) if retained < len(rows) else float("inf")
    return sorted(order[:retained].tolist()), clear


def norm_error(rows: Array, expected: Array) -> float:
    """Norm of the difference over the norm of what was expected."""
    return float(np.linalg.norm(rows - expected) / np.linalg.norm(expected))
