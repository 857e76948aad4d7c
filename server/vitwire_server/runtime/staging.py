"""Staging: conversion of pixels to the tower's input, on the device."""

from collections.abc import Mapping

import torch
from torch import Tensor

from vitwire_server.core.items import Modality
from vitwire_server.core.models import Geometry, Preprocessing
from vitwire_server.preparing.rules.recipe import affine


class Stager:
    """Writes pixels into the tower's input.

    Accepts floats as from the Hugging Face processor, or uint8 before rescaling and normalisation; images may have one
    frame where the processor would duplicate it.
    """

    def __init__(
        self, geometry: Geometry, preprocessing: Mapping[Modality, Preprocessing], device: torch.device
    ) -> None:
        self._geometry = geometry
        self._affine = {modality: _affine(settings, device) for modality, settings in preprocessing.items()}
        self._crops = {modality: _affine(settings.of_crops, device) for modality, settings in preprocessing.items()}

    def stage(self, source: Tensor, modality: Modality, out: Tensor, *, crops: bool = False) -> None:
        """Write `patches * C*T*p*p` or `patches * C*1*p*p` elements into `out (patches, C*T*p*p)`.

        A tile is one row of `C*H*W` elements; `crops` may be normalised differently.
        """
        geometry = self._geometry
        if geometry.channels_last:
            shaped = source.view(out.shape[0], -1, geometry.channels)
            if source.dtype is torch.uint8:
                scale, offset = self._affine[modality]
                shaped = torch.mul(shaped, scale.view(-1)).add_(offset.view(-1))
            out.view(shaped.shape).copy_(shaped)
            return
        area = out.shape[1] // (geometry.channels * geometry.temporal)
        shaped = source.view(out.shape[0], geometry.channels, -1, area)
        if source.dtype is torch.uint8:
            scale, offset = (self._crops if crops else self._affine)[modality]
            shaped = torch.mul(shaped, scale).add_(offset)
        out.view(out.shape[0], geometry.channels, geometry.temporal, area).copy_(shaped)


def _affine(settings: Preprocessing, device: torch.device) -> tuple[Tensor, Tensor]:
    """Scale and offset per channel, `(C, 1, 1)` float32."""
    scale, offset = (torch.tensor(values, device=device).view(-1, 1, 1) for values in affine(settings))
    return scale, offset
