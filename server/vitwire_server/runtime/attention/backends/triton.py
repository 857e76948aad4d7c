"""Vitwire's Triton kernel (`runtime/kernels/attention.py`)."""

from torch import Tensor

from vitwire_server.runtime.attention.interface import Attend


def load() -> Attend:
    """Raises ImportError without Triton."""
    from vitwire_server.runtime.kernels.attention import segment_attention  # noqa: PLC0415 - triton comes with CUDA

    def attend(
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
        return segment_attention(
            q, k, v, boundaries, longest, scale, key_boundaries=key_boundaries, most_keys=most_keys
        )

    return attend
