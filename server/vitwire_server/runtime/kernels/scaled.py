"""Rows in float8 with a scale each. Imports no Triton."""

from typing import NamedTuple

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FLOAT8).max
SMALLEST = 1e-12
"""Rows whose largest value is below this become zeros, with a scale that is still a normal number."""


class Scaled(NamedTuple):
    """Rows in float8; the row that they stand for is `values[i] * scales[i]`."""

    values: Tensor
    """`(rows, columns)` in `FLOAT8`."""
    scales: Tensor
    """`(rows, 1)` in float32."""
