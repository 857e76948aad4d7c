"""Ovis 2 as its authors publish it: modeling_aimv2.py and modeling_ovis.py beside the weights of AIDC-AI/Ovis2-*."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from published_reference import Published, attention
from reference import Array

_TRUNK, _EMBEDDINGS = "visual_tokenizer.backbone.trunk.", "visual_tokenizer.backbone.preprocessor."


class OriginalOvis(Published):
    """Their formula, on their names of the weights."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        super().__init__(checkpoint, dtype, device)
        own = self.settings["visual_tokenizer_config"]
        self._backbone, self._stride = own["backbone_config"], own["hidden_stride"]

    @torch.inference_mode()
    def item(self, grid: tuple[int, int, int], pixels: Tensor, crops: Tensor | None = None) -> Array:
        """The embedding of one image's tiles."""
        assert crops is None
        tokens = self._tokens(self._merged(self._encoded(pixels.to(self.device, self.dtype))))
        rows = tokens @ self._weights["vte.weight"]
        assert grid[0] == len(rows)
        return rows.flatten(0, 1).float().cpu().numpy()

    def _encoded(self, pixels: Tensor) -> Tensor:
        weight, bias = (self._weights[f"{_EMBEDDINGS}patchifier.proj.{name}"] for name in ("weight", "bias"))
        patches = (
            functional.conv2d(pixels, weight, bias, stride=self._backbone["patch_size"]).flatten(2).transpose(1, 2)
        )
        states = self._norm(patches, f"{_EMBEDDINGS}patchifier.norm") + self._weights[f"{_EMBEDDINGS}pos_embed"]
        for layer in range(self._backbone["num_hidden_layers"]):
            block = f"{_TRUNK}blocks.{layer}"
            fused = self.linear(self._norm(states, f"{block}.norm_1"), f"{block}.attn.qkv")
            heads = self._backbone["num_attention_heads"]
            mixed = torch.stack([attention(*tile.chunk(3, dim=-1), heads) for tile in fused])
            states = states + self.linear(mixed, f"{block}.attn.proj")
            states = states + self.gated(self._norm(states, f"{block}.norm_2"), f"{block}.mlp")
        return self._norm(states, f"{_TRUNK}post_trunk_norm")

    def _merged(self, states: Tensor) -> Tensor:
        side, stride = round(states.shape[1] ** 0.5) // self._stride, self._stride
        squares = states.unflatten(1, (side, stride, side, stride)).permute(0, 1, 3, 2, 4, 5)
        merged: Tensor = squares.flatten(3).flatten(1, 2)
        return merged

    def _tokens(self, states: Tensor) -> Tensor:
        logits = self.linear(states, "visual_tokenizer.head.0")
        weight, bias = (self._weights[f"visual_tokenizer.head.1.{name}"] for name in ("weight", "bias"))
        chances = functional.layer_norm(logits, logits.shape[-1:], weight, bias).softmax(-1)
        return functional.pad(chances, (0, 5))

    def _norm(self, states: Tensor, name: str) -> Tensor:
        return self.rms(states, name, self._backbone["rms_norm_eps"])


def original_tiles(image: Image.Image, side: int, most: int = 9) -> list[np.ndarray]:
    """`preprocess_image` of modeling_ovis.py, up to rescaling: tiles (H, W, 3) that are NaN beyond the image."""
    width, height = image.size
    shares = {}
    for rows in range(1, most + 1):
        for columns in range(1, most // rows + 1):
            kept = sum(_covered(box, side) for box in _boxes(width, height, rows, columns))
            shares[rows, columns] = kept / (width * height)
    good = {layout: share for layout, share in shares.items() if share > 0.9}
    if good:
        rows, columns = min(good, key=lambda layout: (layout[0] * layout[1], -good[layout]))
    else:
        rows, columns = min(shares, key=lambda layout: (-shares[layout], layout[0] * layout[1]))
    parts = [image.crop(box) for box in _boxes(width, height, rows, columns)]
    return [_padded(part, side) for part in ([image, *parts] if len(parts) > 1 else parts)]


def _boxes(width: int, height: int, rows: int, columns: int) -> list[tuple[int, int, int, int]]:
    """Left, upper, right and lower of each part; the last ones have what is left over."""
    across, down = width // columns, height // rows
    return [
        (
            column * across,
            row * down,
            width if column == columns - 1 else (column + 1) * across,
            height if row == rows - 1 else (row + 1) * down,
        )
        for row in range(rows)
        for column in range(columns)
    ]


def _covered(box: tuple[int, int, int, int], side: int) -> float:
    long, short = sorted((box[2] - box[0], box[3] - box[1]), reverse=True)
    return short / long * side * side if long > side else long * short


def _padded(part: Image.Image, side: int) -> np.ndarray:
    width, height = part.size
    size = (side, int(height / width * side)) if width > height else (int(width / height * side), side)
    tile = np.full((side, side, 3), np.nan)
    left, top = (side - size[0]) // 2, (side - size[1]) // 2
    tile[top : top + size[1], left : left + size[0]] = np.asarray(part.resize(size, Image.Resampling.BICUBIC))
    return tile
