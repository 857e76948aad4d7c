"""Pixels of any accepted form to the tower's input, on the device."""

from collections.abc import Mapping

import torch
from torch import Tensor

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Geometry, Preprocessing


class Stager:
    """Writes pixels into the tower's input.

    Accepted are floats as the processor emits them, uint8 before rescaling and normalisation, and
    either of them with one frame where the processor would duplicate it.
    """

    def __init__(
        self, geometry: Geometry, preprocessing: Mapping[Modality, Preprocessing], device: torch.device
    ) -> None:
        self._geometry = geometry
        self._affine = {modality: _affine(settings, device) for modality, settings in preprocessing.items()}

    def stage(self, source: Tensor, modality: Modality, out: Tensor) -> None:
        """Write `patches * C*T*p*p` or `patches * C*1*p*p` elements into `out (patches, C*T*p*p)`."""
        geometry = self._geometry
        area = geometry.patch**2
        shaped = source.view(out.shape[0], geometry.channels, -1, area)
        if source.dtype is torch.uint8:
            scale, offset = self._affine[modality]
            shaped = torch.mul(shaped, scale).add_(offset)
        out.view(out.shape[0], geometry.channels, geometry.temporal, area).copy_(shaped)


def _affine(settings: Preprocessing, device: torch.device) -> tuple[Tensor, Tensor]:
    """Scale and offset per channel, `(C, 1, 1)` float32: `x * rescale / std - mean / std`."""
    mean, std = (torch.tensor(values, dtype=torch.float64) for values in (settings.mean, settings.std))
    scale, offset = settings.rescale_factor / std, -mean / std
    return scale.float().to(device).view(-1, 1, 1), offset.float().to(device).view(-1, 1, 1)
