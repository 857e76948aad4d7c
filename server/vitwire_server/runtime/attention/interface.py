"""What an attention backend is."""

from collections.abc import Callable

from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]
"""Attention within segments: `q, k, v (rows, heads, head_dim)`, boundaries `(segments + 1,)` int32, the longest
segment and the softmax scale; returns rows like `q`."""
