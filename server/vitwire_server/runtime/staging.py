"""Pixels from the wire's bytes to the tower's input, and rows back to bytes."""

import warnings

import torch
from torch import Tensor

from vitwire_server.core.items import DType, Embedding, Modality, Pixels
from vitwire_server.core.models import Geometry, Preprocessing

TORCH_TYPES = {
    DType.FLOAT32: torch.float32,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.UINT8: torch.uint8,
}
# Received bytes are only read, never written through the tensor that views them.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


class Stager:
    """Writes pixels of any accepted form into the tower's input.

    Accepted are floats as the processor emits them, uint8 before rescaling and normalisation, and
    either of them with one frame where the processor would duplicate it.
    """

    def __init__(self, geometry: Geometry, preprocessing: dict[Modality, Preprocessing], device: torch.device) -> None:
        self._geometry = geometry
        self._device = device
        self._affine = {modality: _affine(settings, device) for modality, settings in preprocessing.items()}

    def stage(self, pixels: Pixels, modality: Modality, out: Tensor) -> None:
        """Write `(patches, C*T*p*p)` or `(patches, C*1*p*p)` pixels into `out (patches, C*T*p*p)`."""
        geometry = self._geometry
        host = torch.frombuffer(pixels.data, dtype=TORCH_TYPES[pixels.dtype])
        area = geometry.patch**2
        source = host.to(self._device, non_blocking=True).view(out.shape[0], geometry.channels, -1, area)
        if pixels.dtype is DType.UINT8:
            scale, offset = self._affine[modality]
            source = torch.addcmul(offset, source.to(torch.float32), scale)
        out.view(out.shape[0], geometry.channels, geometry.temporal, area).copy_(source)


def _affine(settings: Preprocessing, device: torch.device) -> tuple[Tensor, Tensor]:
    """Scale and offset per channel, `(C, 1, 1)`: `x * rescale / std - mean / std`, folded in float64."""
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in (settings.mean, settings.std))
    scale, offset = settings.rescale_factor / std, -mean / std
    return tuple(x.to(torch.float32).to(device).view(-1, 1, 1) for x in (scale, offset))  # type: ignore[return-value]


def embedding(rows: Tensor, dtype: DType) -> Embedding:
    """Rows on the host, contiguous and in `dtype`, as bytes that keep the tensor alive."""
    tokens, width = rows.shape
    return Embedding(rows.contiguous().view(torch.uint8).numpy().reshape(-1).data, dtype, (tokens, width))
