"""What an attention backend is."""

from typing import Protocol

from torch import Tensor


class Attend(Protocol):
    """Attention within segments."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        boundaries: Tensor,
        longest: int,
        scale: float,
        *,
        key_boundaries: Tensor | None = None,
        most_keys: int = 0,
    ) -> Tensor:
        """`q, k, v (rows, heads, head_dim)`, boundaries `(segments + 1,)` int32, longest segment, softmax scale.

        If a segment has other numbers of queries and of keys, `key_boundaries` end its keys, which are at most
        `most_keys`; a segment without keys has no queries either. Returns rows like `q`; those behind the last
        boundary are undefined.
        """
        ...
