"""Plain transformers, which every embedding is compared with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForImageTextToText

Array = NDArray[np.float32]
TOLERANCE = 1e-5
"""Relative to the largest value: float32 rounds at 6e-8, and a few hundred roundings add up."""


class Reference:
    """The stock vision tower of a checkpoint, with stock attention."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=dtype)
        self.model = model.eval().to(device)
        self.tower: Any = model.model.visual
        self.dtype = dtype

    @torch.inference_mode()
    def encode(self, pixels: Tensor | NDArray[Any], grids: Sequence[tuple[int, int, int]]) -> list[Array]:
        """Embeddings `[main | deepstack ...]` of items whose patches lie one after the other."""
        packed = torch.as_tensor(pixels).to(self.model.device, self.dtype)
        output = self.tower(packed, grid_thw=torch.tensor(grids, device=self.model.device))
        deepstack = getattr(output, "deepstack_features", None) or []
        rows = torch.cat([output.pooler_output, *deepstack], dim=-1)
        merge = self.tower.spatial_merge_size
        tokens = [t * h * w // merge**2 for t, h, w in grids]
        return [part.float().cpu().numpy() for part in torch.split(rows, tokens)]


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
