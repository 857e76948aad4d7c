"""torch's `varlen_attn`, in torch 2.11 or newer."""

from inspect import signature

from torch import Tensor

from vitwire_server.runtime.attention.interface import Attend


def load() -> Attend:
    """Raises ImportError if torch is too old."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - not in torch before 2.10

    if "scale" not in signature(varlen_attn).parameters:
        raise ImportError("varlen_attn of torch 2.10 has no scale")

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
        q, k, v = (x.contiguous() for x in (q, k, v))
        ends, most = (boundaries, longest) if key_boundaries is None else (key_boundaries, most_keys)
        out = varlen_attn(q, k, v, boundaries, ends, longest, most, scale=scale)
        assert isinstance(out, Tensor)
        return out

    return attend
