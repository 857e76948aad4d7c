"""NV12 to RGB, with the integers of swscale on x86: yuv_2_rgb.asm and yuv2rgb.c of FFmpeg's libswscale.

All products have 16 bits, of which the upper half stays; a chroma sample serves four pixels. swscale takes this way for
pictures of 4:2:0 and 8 bits whose height is even.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

_BT601, _BT709 = (104597, 132201, 25675, 53279), (117489, 138438, 13975, 34925)
_MATRICES = {
    1: _BT709,
    2: _BT601,
    4: (104448, 132798, 24759, 53109),
    5: _BT601,
    6: _BT601,
    7: (117579, 136230, 16907, 35559),
    9: (110013, 140363, 12277, 42626),
}
"""Red by V, blue by U, green by U and V, with 16 bits after the point, by the number of the matrix in ITU-T H.273."""
_ONE = 1 << 16
_SHIFT = 3
"""Samples have this many bits after the point when they are multiplied."""
_MIDDLE = 128
_BLACK, _WHITE_OF_LIMITED, _CHROMA_OF_LIMITED, _WHITE = 16, 219, 224, 255


class Colours(NamedTuple):
    """How the samples of a stream are coded."""

    matrix: int
    """As H.273 numbers it; 2 is unspecified."""
    is_full: bool
    """Whether luma takes all values from 0 to 255."""

    @property
    def is_known(self) -> bool:
        """Whether `rgb` converts them."""
        return self.matrix in _MATRICES


class _Factors(NamedTuple):
    """With 13 bits after the point, within 16 bits."""

    luma: int
    red: int
    blue: int
    green_u: int
    green_v: int
    offset: int
    """Of luma, with `_SHIFT` bits after the point."""


@lru_cache
def _factors(colours: Colours) -> _Factors:
    red, blue, green_u, green_v = _MATRICES[colours.matrix]
    luma, offset = _ONE, 0
    if colours.is_full:
        red, blue, green_u, green_v = (each * _CHROMA_OF_LIMITED // _WHITE for each in (red, blue, green_u, green_v))
    else:
        luma, offset = _ONE * _WHITE // _WHITE_OF_LIMITED, _BLACK << _SHIFT

    def scaled(number: int) -> int:
        return min(((number << 13) + (_ONE >> 1)) >> 16, (1 << 15) - 1)

    return _Factors(scaled(luma), scaled(red), scaled(blue), scaled(-green_u), scaled(-green_v), offset)


def rgb(luma: Tensor, chroma: Tensor, colours: Colours) -> Tensor:
    """`(H, W, 3)` of samples `(H, W)` and pairs `(H / 2, ceil(W / 2), 2)` of U and V; uint8. H is even."""
    factors = _factors(colours)
    height, width = luma.shape
    if luma.is_cuda:
        from vitwire_server.preparing.device.planes import convert  # noqa: PLC0415 - needs Triton

        convert(luma, chroma, factors, target := luma.new_empty(height, width, 3))
        return target
    bright = _upper((luma.to(torch.int32) << _SHIFT) - factors.offset, factors.luma)
    u, v = ((chroma.to(torch.int32) - _MIDDLE) << _SHIFT).unbind(-1)
    green = _upper(u, factors.green_u) + _upper(v, factors.green_v)
    added = torch.stack([_upper(v, factors.red), green, _upper(u, factors.blue)], -1)
    spread = added.repeat_interleave(2, 0).repeat_interleave(2, 1)[:height, :width]
    return (spread + bright[..., None]).clamp_(0, _WHITE).to(torch.uint8)


def _upper(samples: Tensor, factor: int) -> Tensor:
    return (samples * factor) >> 16
