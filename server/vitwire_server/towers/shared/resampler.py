"""A resampler: learned queries attend to the patches of each image, and become its rows."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vitwire_server.core.grids import Grid
from vitwire_server.towers.configs import Config
from vitwire_server.towers.layouts.raster import places
from vitwire_server.towers.metadata import Kind, Rows

LONGEST_SIDE = 1024
"""Patches a side of an image at most: positions are looked up in a table."""
_HEAD = 128
_EPSILON = 1e-6

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""From queries, keys and values `(rows, heads, head_dim)` and a scale to what the queries get of their segment."""


class Resampler(nn.Module):
    """One layer of cross attention, with keys that know the row and column of their patch.

    Queries are the same for every image.
    """

    waves: Tensor

    def __init__(self, config: Config) -> None:
        """`config` is the whole checkpoint's."""
        super().__init__()
        width, patch_width = config.text_config.hidden_size, config.vision_config.hidden_size
        self.query = nn.Parameter(torch.zeros(config.query_num, width))
        self.kv_proj = nn.Identity() if patch_width == width else nn.Linear(patch_width, width, bias=False)
        self.attn = nn.MultiheadAttention(width, width // _HEAD)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(width, eps=_EPSILON) for _ in range(3))
        self.proj = nn.Parameter(torch.zeros(width, width))
        self.register_buffer("waves", _waves(width // 2), persistent=False)

    @property
    def queries(self) -> int:
        """Rows of an image."""
        return len(self.query)

    @property
    def heads(self) -> tuple[int, int]:
        """Their number, and the size of one."""
        return self.attn.num_heads, _HEAD

    def inputs(self) -> dict[str, Kind]:
        """The metadata that `forward` takes."""
        return {"places": Rows((2,), torch.int64)}

    def compute(self, grid: Grid) -> dict[str, Tensor]:
        """That metadata of an item that is alone, on the host."""
        return {"places": places(grid)}

    def forward(self, states: Tensor, places: Tensor, segments: int, attend: Attend) -> Tensor:
        """`states (patches, C)` to rows `(segments * queries, width)`."""
        values = self.ln_kv(self.kv_proj(states))
        down, across = self.waves[places].unbind(1)
        keys = values + torch.cat([across, down], dim=-1).to(values.dtype)
        weights, biases = self.attn.in_proj_weight.chunk(3), self.attn.in_proj_bias.chunk(3)
        inputs = (self.ln_q(self.query), keys, values)
        query, key, value = (
            functional.linear(*each).unflatten(-1, (-1, _HEAD)) for each in zip(inputs, weights, biases, strict=True)
        )
        attended = attend(query.repeat(segments, 1, 1), key, value, _HEAD**-0.5).flatten(1)
        rows: Tensor = self.ln_post(self.attn.out_proj(attended)) @ self.proj
        return rows


def _waves(width: int) -> Tensor:
    """Sines, then cosines, of each place along an axis, `(LONGEST_SIDE, width)`, by numpy as published."""
    frequencies = np.arange(width // 2, dtype=np.float32)
    frequencies /= width / 2.0
    angles = np.outer(np.arange(LONGEST_SIDE, dtype=np.float32), 1.0 / 10000**frequencies)
    return torch.from_numpy(np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)).float()
