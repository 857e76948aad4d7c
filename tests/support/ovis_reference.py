"""Ovis 2 as its authors publish it: modeling_aimv2.py and modeling_ovis.py beside the weights of AIDC-AI/Ovis2-*."""

import numpy as np
from PIL import Image
from torch import Tensor
from torch.nn import functional

from published_reference import PublishedTiles, attention, squares

_TRUNK, _EMBEDDINGS = "visual_tokenizer.backbone.trunk", "visual_tokenizer.backbone.preprocessor"


class OriginalOvis(PublishedTiles):
    """Their formula, on their names of the weights."""

    def _rows(self, tile: Tensor) -> Tensor:
        own = self.settings["visual_tokenizer_config"]
        backbone, stride, eps = own["backbone_config"], own["hidden_stride"], own["backbone_config"]["rms_norm_eps"]
        patches = self.embedded(tile, f"{_EMBEDDINGS}.patchifier.proj")
        normed = self.rms(patches, f"{_EMBEDDINGS}.patchifier.norm", eps)
        states = normed + self.weight(f"{_EMBEDDINGS}.pos_embed")[0]
        for layer in range(backbone["num_hidden_layers"]):
            block = f"{_TRUNK}.blocks.{layer}"
            q, k, v = self.linear(self.rms(states, f"{block}.norm_1", eps), f"{block}.attn.qkv").chunk(3, dim=-1)
            mixed = attention(q, k, v, backbone["num_attention_heads"])
            states = states + self.linear(mixed, f"{block}.attn.proj")
            states = states + self.gated(self.rms(states, f"{block}.norm_2", eps), f"{block}.mlp")
        merged = squares(self.rms(states, f"{_TRUNK}.post_trunk_norm", eps), stride)
        logits = self.linear(merged, "visual_tokenizer.head.0")
        chances = self.norm(logits, "visual_tokenizer.head.1", 1e-5).softmax(-1)
        return functional.pad(chances, (0, 5)) @ self.weight("vte.weight")


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
