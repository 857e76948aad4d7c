"""Flash attention 3 and 4 (`fa3.py`, `fa4.py`), called as their packages are installed.

torch's switch to them applies to the whole process, and in torch 2.11 to 2.13 expects two results where flash
attention 4 now returns five.
"""

from importlib import import_module

from torch import Tensor

from vitwire_server.runtime.attention.interface import Attend


def from_package(module: str) -> Attend:
    """The backend of an installed package. Raises ImportError if it is missing."""
    varlen = import_module(module).flash_attn_varlen_func

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
        ends, most = (boundaries, longest) if key_boundaries is None else (key_boundaries, most_keys)
        bounds = {"cu_seqlens_q": boundaries, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": most}
        out = varlen(q, k, v, **bounds, softmax_scale=scale)
        rows: Tensor = out[0] if isinstance(out, tuple) else out
        return rows

    return attend
